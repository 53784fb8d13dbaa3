"""Dot products, rounding and stores; and that the interpreter's own are as wrong as `numerics` says."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from every import every
from kernel_device import FLOAT8, has_dtype

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'srv-kernels[triton]'")

import triton.language as tl  # noqa: E402

from srv_kernels.triton import numerics  # noqa: E402
from srv_kernels.triton.numerics import dot, store, widen  # noqa: E402

KERNELS = Path(numerics.__file__).parent
SIZE = tl.constexpr(32)  # of products: the least that tensor cores have for every dtype
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, *filter(has_dtype, FLOAT8))
PRODUCTS = (torch.float32, *HALVES, *filter(has_dtype, (torch.float8_e4m3fn,)), torch.int8)


@triton.jit
def _store(x, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    store(out + at, tl.load(x + at))


@triton.jit
def _store_raw(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty, fp_downcast_rounding="rtne"))


@triton.jit
def _widen(x, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, widen(tl.load(x + at)))


@triton.jit
def _product(a, b, out, RAW: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.load(out + at)
    x, y = tl.load(a + at), tl.load(b + at)
    total = tl.dot(x, y, total) if RAW else dot(x, y, total)
    tl.store(out + at, total)


def _finite(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a dtype, ascending, as float32."""
    integers = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(integers)
    numbers = torch.arange(limits.min, limits.max + 1).to(integers).view(dtype).float()
    return numbers[numbers.isfinite()].unique()


def _hard_numbers(dtype: torch.dtype) -> torch.Tensor:
    """float32 [n · 1024]: numbers of the dtype, the ties between them, the neighbours of ties, and the extremes."""
    numbers = _finite(dtype)
    if dtype.itemsize == 2:
        numbers = torch.cat(
            (numbers[::37], numbers[-3:], numbers[numbers.abs().argsort()[:300]].sort().values)
        ).unique()
    ties = (numbers[1:].double() + numbers[:-1].double()).div(2).float()
    infinity = torch.tensor(torch.inf)
    extremes = torch.tensor([0.0, -0.0, 3e38, -3e38, torch.inf, -torch.inf, torch.nan])
    edges = torch.cat((numbers, ties, ties.nextafter(infinity), ties.nextafter(-infinity), extremes))
    return torch.cat((edges, torch.zeros(-len(edges) % 1024)))


def _rounded(x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=device)
    _store[(len(x) // 1024,)](x.to(device), out, N=1024)
    return out.cpu()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and NaN
@every("dtype", FLOATS)
def test_stores_round_to_nearest_even_as_torch_does(dtype: torch.dtype, device: torch.device) -> None:
    x = _hard_numbers(dtype)
    largest = torch.finfo(dtype).max
    want = (x.clamp(-largest, largest) if dtype in FLOAT8 else x).to(dtype)
    got, want = _rounded(x, dtype, device).float(), want.float()
    same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
    assert same.all(), f"{x[~same][:4]} became {got[~same][:4]}, not {want[~same][:4]}"


def test_stores_of_int8_round_and_saturate(device: torch.device) -> None:
    x = torch.cat((torch.linspace(-140, 140, 1021), torch.tensor([0.5, 1.5, -2.5])))
    assert torch.equal(_rounded(x, torch.int8, device), x.round().clamp(-128, 127).to(torch.int8))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every("dtype", FLOATS)
def test_every_number_is_widened_exactly(dtype: torch.dtype, device: torch.device) -> None:
    codes = torch.arange(256).to(torch.uint8) if dtype in FLOAT8 else torch.arange(-(2**15), 2**15).to(torch.int16)
    x, out = codes.view(dtype), torch.empty(len(codes), device=device)
    _widen[(len(codes) // 256,) if dtype in FLOAT8 else (1,)](x.to(device), out, N=256 if dtype in FLOAT8 else 65536)
    torch.testing.assert_close(out.cpu(), x.float(), rtol=0, atol=0, equal_nan=True)


@every("dtype", PRODUCTS)
def test_dot_adds_the_product(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    scale = 20 if dtype == torch.int8 else 1
    a, b = (torch.randn(32, 32, generator=generator).mul(scale).to(dtype) for _ in range(2))
    out = torch.full((32, 32), 3, dtype=torch.int32 if dtype == torch.int8 else torch.float32).to(device)
    _product[(1,)](a.to(device), b.to(device), out, RAW=False)
    torch.testing.assert_close(out.cpu().double(), a.double() @ b.double() + 3, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
class TestTraps:
    """What goes wrong without the helpers. If one of these fails, the interpreter has improved: simplify `numerics`."""

    pytestmark = pytest.mark.usefixtures("interpreted")

    def test_tl_dot_multiplies_the_bits_of_bfloat16(self) -> None:
        a, b = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16()
        out = torch.zeros(32, 32)
        _product[(1,)](a, b, out, RAW=True)
        assert (out - a.float() @ b.float()).abs().max() > 1e6

    @every("dtype", (torch.bfloat16, torch.float8_e5m2))
    def test_conversions_do_not_round_to_nearest(self, dtype: torch.dtype) -> None:
        x = _finite(dtype)
        x = x[(x > 1) & (x < 2)]
        x = (
            (x + (x[1] - x[0]) * 0.75).repeat(1024 // len(x) + 1)[:1024]
            if dtype == torch.float8_e5m2
            else x[:64] * 1.003
        )
        x = x[:64].contiguous()
        out = torch.empty(64, dtype=dtype)
        _store_raw[(1,)](x, out, N=64)
        assert (out.float() != x.to(dtype).float()).any()


def _raw_uses(source: str) -> Iterator[str]:
    """Uses of what `numerics` replaces, as "line: code"."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        call, target = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
        raw = call.startswith("tl.") and node.func.attr in ("dot", "dot_scaled", "store", "cast")
        if raw or (node.func.attr == "to" and any(part in target for part in ("bfloat16", "float8", "element_ty"))):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_kernels_use_the_helpers() -> None:
    files = [path for path in KERNELS.glob("*.py") if path.name != "numerics.py"]
    assert len(files) > 5
    assert [f"{path.name}:{use}" for path in files for use in _raw_uses(path.read_text(encoding="utf-8"))] == []


@every(
    "code",
    (
        "tl.dot(a, b)",
        "tl.store(p, x)",
        "x.to(tl.bfloat16)",
        "x.to(tl.float8e5)",
        "x.to(out.dtype.element_ty)",
        "tl.cast(x, tl.float8e5)",
    ),
)
def test_the_scan_finds_raw_uses(code: str) -> None:
    assert list(_raw_uses(code)) == [f"1: {code}"]


def test_store_refuses_to_convert_between_halves(device: torch.device) -> None:
    x, out = torch.zeros(1024, dtype=torch.float16, device=device), torch.zeros(1024, device=device).bfloat16()
    with warnings.catch_warnings(), pytest.raises(Exception) as raised:  # noqa: PT011  it depends on the compiler
        _store[(1,)](x, out, N=1024)
    messages, error = [], raised.value
    while error is not None:
        messages.append(str(error))
        error = error.__cause__ or error.__context__
    assert any("round_to rounds float32" in message for message in messages), messages
