"""The Triton operators keep the op contracts, on a GPU or interpreted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from every import every
from kernel_device import FLOAT8 as ALL_FLOAT8
from kernel_device import has_dtype
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: pip install 'srv-kernels[triton]'")

from srv_kernels.cases import Case
from srv_kernels.contracts import CONTRACTS, OpContract, violations
from srv_kernels.tolerances import DTYPES
from srv_kernels.triton import activations, kv_write, norms, page_copies, rotary  # noqa: F401  they register
from srv_kernels.triton.registration import INTERPRETED

OPS = ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul", "gelu_tanh_and_mul")
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = tuple(filter(has_dtype, ALL_FLOAT8))[:2]  # in the interpreter, as on most targets

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: exp overflows where the result is 0


def _op(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.srv_triton, name)  # type: ignore[no-any-return]


def _few_rows(contract: OpContract) -> OpContract:
    """Interpreted, the cases of up to 5 rows: every row is a program of its own, and takes 1 ms."""

    def cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
        return (case for case in contract.cases(dtype, seed) if case.args[0].shape[0] <= 5)

    return dataclasses.replace(contract, cases=cases) if INTERPRETED else contract


@every("dtype", DTYPES)
@every("op", OPS)
def test_operator_keeps_its_contract(op: str, dtype: torch.dtype, device: torch.device) -> None:
    assert violations(_few_rows(CONTRACTS[op]), _op(op), dtype, device) == []


@every("op", OPS)
def test_shapes_are_known_without_running(op: str, device: torch.device) -> None:
    case = next(case for case in CONTRACTS[op].cases(torch.bfloat16, 0) if case.args[0].shape[0] == 3)

    def shapes(where: torch.device | str) -> list[tuple[Any, ...]]:
        result = _op(op)(*(arg.to(where) if isinstance(arg, Tensor) else arg for arg in case.args))
        return [(x.shape, x.dtype, x.stride()) for x in (result if isinstance(result, tuple) else (result,))]

    assert shapes("meta") == shapes(device)


@every("shape", [(2, 3, 64), (64,)])
def test_norms_and_activations_take_any_leading_axes(shape: tuple[int, ...], device: torch.device) -> None:
    x, weight = torch.randn(shape).bfloat16(), torch.randn(64).bfloat16()
    for op, *rest in (("rms_norm", weight, 1e-6), ("silu_and_mul",)):
        got = _op(op)(x.to(device), *(arg.to(device) if isinstance(arg, Tensor) else arg for arg in rest))
        want = CONTRACTS[op].oracle(x, *rest)
        torch.testing.assert_close(got.cpu().double(), want, rtol=2e-2, atol=2e-2)


def test_norm_rounds_before_the_weight_as_published_models_do(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(5, 576, generator=generator).bfloat16()
    weight = torch.randn(576, generator=generator).bfloat16()
    wide = x.float()
    want = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(_op("rms_norm")(x.to(device), weight.to(device), 1e-5).cpu(), want)


class TestWriteKV:
    """Pools of 4 pages of 8 tokens; the key's dimension is not the value's, and neither is a power of two."""

    SLOTS = (9, 31, 0, 3, 16)  # two rows of padding: they go to page 0

    def _written(self, dtype: torch.dtype, pool: torch.dtype, device: torch.device, *scales: float) -> None:
        generator = torch.Generator().manual_seed(2)
        fused = torch.randn(5, 3 * (24 + 40) + 7, generator=generator).mul(3).to(dtype)
        key, value = fused[:, :72].view(5, 3, 24), fused[:, 72:192].view(5, 3, 40)
        pools = [torch.full((4, 8, 3, dim), 2.0).to(pool) for dim in (24, 40)]
        got, slots = [one.to(device) for one in pools], torch.tensor(self.SLOTS)
        scaled = [torch.tensor([scale]) for scale in scales]
        on_device = [x.to(device) for x in (slots, *scaled)]
        _op("write_kv")(*(_like_strided(x, device) for x in (key, value)), *got, *on_device)
        for index, (vectors, want) in enumerate(zip((key, value), pools, strict=True)):
            exact = vectors.float() / scaled[index] if scales else vectors.float()
            largest = torch.finfo(pool).max
            rounded = exact.clamp(-largest, largest).to(pool)
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[pool.itemsize]
            want.view(bits).flatten(0, 1)[slots] = rounded.view(bits)
            assert torch.equal(got[index].cpu().view(bits), want.view(bits))

    def test_every_slot_and_no_other(self, device: torch.device) -> None:
        for dtype in PLAIN:
            self._written(dtype, dtype, device)

    @every("dtype", (torch.float32, torch.bfloat16))
    @every("pool", FLOAT8)
    def test_float8_with_scales(self, dtype: torch.dtype, pool: torch.dtype, device: torch.device) -> None:
        self._written(dtype, pool, device, 0.5, 0.25)

    def test_float8_saturates(self, device: torch.device) -> None:
        for pool in FLOAT8:
            scale = 2.0 ** -math.floor(math.log2(torch.finfo(pool).max))
            self._written(torch.float32, pool, device, scale, scale / 2)

    def test_float32_is_rounded_into_a_narrower_pool(self, device: torch.device) -> None:
        self._written(torch.float32, torch.bfloat16, device)

    def test_no_tokens(self, device: torch.device) -> None:
        pool, none = torch.ones(2, 8, 1, 16, device=device), torch.ones(0, 1, 16, device=device)
        _op("write_kv")(none, none, pool, pool.clone(), torch.ones(0, dtype=torch.int64, device=device))
        assert (pool == 1).all()

    @every(
        ("pool", "scales", "message"),
        [
            (torch.zeros(2, 8, 1, 16).to(torch.int8), (), "float pools, not torch.int8"),
            (torch.zeros(2, 8, 1, 32)[..., ::2], (), "contiguous float pools"),
            (torch.zeros(2, 8, 1, 16), (torch.ones(1),), "or neither"),
        ],
    )
    def test_refusals(self, pool: Tensor, scales: tuple[Tensor, ...], message: str, device: torch.device) -> None:
        x, slots = torch.zeros(1, 1, 16), torch.zeros(1, dtype=torch.int64)
        with pytest.raises(ValueError, match=message):
            kv_write.write_kv(x, x, pool, pool, slots, *scales)


def _like_strided(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, with the strides of the original."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return copy.copy_(x)


class TestCopyPages:
    @every(
        ("dtype", "page"),
        [
            (torch.bfloat16, (16, 2, 64)),  # two programs per page
            (torch.uint8, (3, 7)),
            (torch.int16, (3, 5)),
            (torch.float8_e4m3fn, (4, 3)),
        ],
    )
    def test_pages_and_nothing_else(self, dtype: torch.dtype, page: tuple[int, ...], device: torch.device) -> None:
        source = torch.randint(0, 256, (5, *page, dtype.itemsize)).to(torch.uint8)
        target = torch.randint(0, 256, (4, *page, dtype.itemsize)).to(torch.uint8)
        pairs = torch.tensor([[4, 1], [2, 3]])
        read, written = (x.clone().view(dtype).squeeze(-1).to(device) for x in (source, target))
        _op("copy_pages")(read, written, pairs.to(device))
        target[pairs[:, 1]] = source[pairs[:, 0]]
        assert torch.equal(written.cpu().unsqueeze(-1).view(torch.uint8), target)

    def test_no_pages(self, device: torch.device) -> None:
        pool = torch.ones(2, 8, device=device)
        _op("copy_pages")(torch.zeros(2, 8, device=device), pool, torch.zeros(0, 2, dtype=torch.int64, device=device))
        assert (pool == 1).all()

    @every(
        ("source", "message"),
        [
            (torch.zeros(3, 9), r"pages of torch.float32 \(9,\) do not fit among pages of torch.float32 \(8,\)"),
            (torch.zeros(3, 8).half(), "pages of torch.float16"),
            (torch.zeros(8, 3).T, "contiguous"),
        ],
    )
    def test_refusals(self, source: Tensor, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            page_copies.copy_pages(source, torch.zeros(2, 8), torch.zeros(1, 2, dtype=torch.int64))
