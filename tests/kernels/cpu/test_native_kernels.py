"""The native CPU kernels, on every instruction set that this machine has."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from every import every
from native_again import own_tests
from native_linear_checked import assert_linear, uses_int16_path

from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.cpu import build, library
from srv_matrix.pytest_plugin import covers

LOADED = library.load()
if LOADED.library is not None:
    from srv_kernels.cpu import native_library, native_linear, native_ops

# Skipped test by test, so that they can be collected, and evidence of them judged, on a machine without a compiler.
NO_KERNELS = f"no native kernels here: {LOADED.reason}"
native = pytest.mark.skipif(LOADED.library is None, reason=NO_KERNELS)
GGUF_TYPES = tuple(native_linear.GGML_TYPES) if LOADED.library is not None else ("none",)
ISAS = tuple(build.isas())
OPS = (
    *("rms_norm", "add_rms_norm", "rotary", "silu_and_mul"),
    *("linear_w8a8", "linear_w8a8_static", "linear_int8", "linear_gguf", "rows_gguf"),
)
DTYPES = (torch.float32, torch.bfloat16)
OF_AVX2 = [
    pytest.param(
        op,
        dtype,
        marks=covers(f"op:{op}/{str(dtype)[6:]}", platform="cpu", variant="avx2", note="forced path"),
        id=f"{op}-{str(dtype)[6:]}",
    )
    for op in OPS
    for dtype in DTYPES
]


@pytest.fixture(params=(1, 2, 5))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    native_library.set_threads(request.param)
    yield request.param
    native_library.set_threads(1)


@every("dtype", DTYPES)
@every("op", OPS)
def test_ops_keep_their_contract(isa: str, threads: int, op: str, dtype: torch.dtype) -> None:
    assert violations(CONTRACTS[op], getattr(native_ops, op), dtype) == []


@pytest.mark.parametrize("isa", ["avx2"], indirect=True)
@pytest.mark.parametrize(("op", "dtype"), OF_AVX2)
def test_a_newer_processor_made_to_take_the_path_of_avx2_keeps_the_contract(
    isa: str, op: str, dtype: torch.dtype
) -> None:
    assert LOADED.isa == isa
    assert violations(CONTRACTS[op], getattr(native_ops, op), dtype) == []


def _matrix(seed: int, rows: int, columns: int, dtype: torch.dtype, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype)


def _assert_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    assert_linear(native_linear.linear(weight, bias)(x), x, weight, bias)


@every("dtype", DTYPES)
@every("bias", [False, True])
@every(("outputs", "inputs"), [(1, 1), (33, 7), (32, 2), (576, 576), (50, 1001), (96, 1536)])
@every("rows", [0, 1, 2, 3, 11, 12, 13, 25, 64])
def test_linear(isa: str, outputs: int, inputs: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    weight = _matrix(1, outputs, inputs, dtype)
    offset = _matrix(2, 1, outputs, dtype)[0] if bias else None
    _assert_linear(_matrix(3, rows, inputs, dtype), weight, offset)


@every("dtype", DTYPES)
def test_rows_of_a_wider_matrix_and_odd_addresses(isa: str, dtype: torch.dtype) -> None:
    wide = _matrix(4, 9, 131, dtype)
    _assert_linear(wide[:, 3:80], _matrix(5, 70, 77, dtype), None)
    _assert_linear(wide.T[:50].T, _matrix(6, 40, 50, dtype), None)


@every("spread", [1e-17, 1e18])
def test_magnitudes_near_the_ends_of_bfloat16(isa: str, spread: float) -> None:
    """Sums are a thousand times what may be taken for zero, or a twentieth of the largest number."""
    _assert_linear(_matrix(7, 5, 64, torch.bfloat16, spread), _matrix(8, 64, 64, torch.bfloat16, spread), None)


@every("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(isa: str, dtype: torch.dtype) -> None:
    x, layer = _matrix(9, 30, 576, dtype), native_linear.linear(_matrix(10, 160, 576, dtype), None)
    together = layer(x)
    native_library.set_threads(3)
    for row in (0, 13, 29):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
    native_library.set_threads(1)


def _bytes(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)


@every("dtype", DTYPES)
@every(("outputs", "inputs"), [(1, 1), (33, 7), (32, 4), (576, 576), (50, 1001)])
@every("rows", [0, 1, 3, 12, 13, 25])
def test_int8_linear_results_are_exact_sums(isa: str, outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    """Whole numbers times whole numbers of at most 127 steps: the row's largest is 127, so that a step is 1."""
    x = torch.randint(-126, 127, (rows, inputs), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, -1] = 127
    weight = _bytes(2, outputs, inputs)
    exact = x.double() @ weight.double().T
    assert torch.equal(native_linear.W8A8Linear(weight, torch.ones(outputs))(x), exact.to(dtype))
    int32_bias = torch.arange(outputs, dtype=torch.int32)
    shifted = native_linear.W8A8Linear(weight, torch.ones(outputs), int32_bias=int32_bias, static=(1.0, 1.0))(x - 1)
    assert torch.equal(shifted, (exact + int32_bias).to(dtype))


@every("dtype", DTYPES)
@every("static", [(0.0, 0.0), (32.0, 3.0)])
def test_a_row_of_bytes_depends_on_no_other(isa: str, static: tuple[float, float], dtype: torch.dtype) -> None:
    x = _matrix(9, 30, 200, dtype)[:, 3:180]  # rows of a wider matrix, at odd addresses
    layer = native_linear.W8A8Linear(_bytes(10, 160, 177), torch.rand(160), static=static)
    together = layer(x)
    native_library.set_threads(3)
    for row in (0, 13, 29):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
    native_library.set_threads(1)


@every("dtype", DTYPES)
@every(("outputs", "inputs"), [(1, 1), (33, 7), (32, 4), (576, 576), (50, 1001)])
@every("rows", [0, 1, 3, 12, 13, 25])
def test_weights_of_8_bits_are_multiplied_as_they_are(
    isa: str, outputs: int, inputs: int, rows: int, dtype: torch.dtype
) -> None:
    """Every step of a weight is exact in either dtype: whole numbers, and scales and biases that are, too."""
    x = torch.randint(-9, 10, (rows, inputs), generator=torch.Generator().manual_seed(1)).to(dtype)
    weight, scales = _bytes(2, outputs, inputs), 2.0 ** (torch.arange(outputs) % 5 - 2)
    bias = (torch.arange(outputs) % 7).to(dtype)
    exact = x.double() @ weight.double().T * scales
    assert torch.equal(native_linear.Int8WeightLinear(weight, scales)(x), exact.to(dtype))
    assert torch.equal(native_linear.Int8WeightLinear(weight, scales, bias)(x), (exact + bias.double()).to(dtype))


@every("dtype", DTYPES)
def test_a_row_times_weights_of_8_bits_depends_on_no_other(isa: str, dtype: torch.dtype) -> None:
    x = _matrix(9, 30, 200, dtype)[:, 3:180]  # rows of a wider matrix, at odd addresses
    layer = native_linear.Int8WeightLinear(_bytes(10, 160, 177), torch.rand(160))
    together = layer(x)
    native_library.set_threads(3)
    for row in (0, 13, 29):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
    native_library.set_threads(1)


@every("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_with_int8_weights(isa: str, bad: float) -> None:
    x = _matrix(13, 3, 70, torch.float32)
    layer = native_linear.Int8WeightLinear(_bytes(14, 40, 70) | 1, torch.ones(40))  # no weight is 0
    clean = layer(x)
    x[1, 65] = bad
    got = layer(x)
    assert not bool(got[1].isfinite().any())
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@every("bad", [float("nan"), float("inf")])
@every("static", [(0.0, 0.0), (32.0, 3.0)])
def test_what_is_not_finite_stays_so_in_its_row_alone(isa: str, bad: float, static: tuple[float, float]) -> None:
    x = _matrix(13, 3, 70, torch.float32)
    layer = native_linear.W8A8Linear(_bytes(14, 40, 70), torch.ones(40), static=static)
    clean = layer(x)
    x[1, 65] = bad
    got = layer(x)
    assert not bool(got[1].isfinite().any())
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@every("dtype", DTYPES)
@every("stored", GGUF_TYPES)
@every("rows", [13, 45])
def test_gguf_linear_equals_its_dequantized_weights(isa: str, stored: str, dtype: torch.dtype, rows: int) -> None:
    """Inputs that are whole numbers, with a largest of 127 among every 16, are not rounded.

    By words they are not if the largest divides 32,767, which 217 does. For many rows blocks of 4 bits are opened.
    """
    (case,) = [each for each in CONTRACTS["linear_gguf"].cases(dtype, 3) if each.label == f"{stored}, 5x512 to 70"]
    weight = native_linear.GGUFWeight(case.args[1], stored, 512)
    largest = 217 if uses_int16_path(isa, stored) else 127
    x = torch.randint(1 - largest, largest, (rows, 512), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, ::16] = largest
    bias = _matrix(2, 1, 70, dtype)[0]
    plain = weight.rows(torch.arange(70), torch.float32).double()
    assert_linear(native_linear.FusedGGUFLinear([weight], bias)(x), x, plain, bias)
    assert torch.equal(weight.linear(x[7:8])[0], weight.linear(x)[7])
    assert torch.equal(weight.linear(x[:12]), weight.linear(x)[:12])


@functools.cache
def _contract_rows() -> dict[str, torch.Tensor]:
    """Of each type 70 rows of 512 random numbers with finite scales, as a file has them."""
    cases = {each.label: each.args[1] for each in CONTRACTS["linear_gguf"].cases(torch.float32, 3)}
    return {stored: cases[f"{stored}, 5x512 to 70"] for stored in native_linear.GGML_TYPES}


def _stored_rows(stored: str, inputs: int) -> torch.Tensor:
    """The first 40 of a type's rows, and the first inputs of them."""
    rows = _contract_rows()[stored]
    return rows[:40, : rows.shape[1] * inputs // 512].clone()


def _scales_at(stored: str) -> list[slice]:
    """Where a block's half precision scales lie."""
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    found = places.get(stored, (0, 2) if stored in ("Q4_1", "Q5_1") else (0,))
    return [slice(place, place + 2) for place in found]


@every("byte", [0, 127, 128, 255])
@every("stored", GGUF_TYPES)
def test_the_largest_numbers_times_the_largest_steps_do_not_overflow(isa: str, stored: str, byte: int) -> None:
    """Every byte of a block the same but for its scales, every input the largest to one side or to both in turn."""
    rows = _stored_rows(stored, 256)
    size = native_library.LIBRARY.srv_gguf_row_bytes(native_linear.GGML_TYPES[stored], 256)
    blocks = rows.view(40, -1, size if stored.endswith("_K") else size // 8)
    scales = [blocks[..., at].clone() for at in _scales_at(stored)]
    blocks.fill_(byte)
    for at, scale in zip(_scales_at(stored), scales, strict=True):
        blocks[..., at] = scale
    if stored == "Q6_K":
        blocks[..., 192:208] = 1  # scales of groups, whole numbers: bytes of 0 would make zeros of all weights
    weight = native_linear.GGUFWeight(rows, stored, 256)
    plain = weight.rows(torch.arange(40), torch.float32).double()
    x = 127 * torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 0.0]]).repeat(1, 128)
    exact, most = x.double() @ plain.T, x.double().abs() @ plain.abs().T
    assert bool(((weight.linear(x).double() - exact).abs() <= 2e-6 * most).all())


@every("dtype", DTYPES)
@every("stored", GGUF_TYPES)
@every(("rows", "threads"), [(13, 1), (45, 3)])
def test_a_row_of_blocks_does_not_depend_on_its_neighbours(
    isa: str, stored: str, dtype: torch.dtype, rows: int, threads: int
) -> None:
    """Nor on whether there are so many that blocks are opened, by threads which begin within one."""
    native_library.set_threads(threads)
    for inputs in (512, 256):
        weight = native_linear.GGUFWeight(_stored_rows(stored, inputs), stored, inputs)
        x = _matrix(17, rows, inputs, dtype)
        together = weight.linear(x)
        for row in (0, 5, 7, 12):
            assert torch.equal(weight.linear(x[row : row + 1])[0], together[row])
        assert torch.equal(weight.linear(x[rows - 4 :]), together[rows - 4 :])


def _most_multiple(isa: str, stored: str) -> int:
    """How many of a row's units its largest step of 8 bits has, by how blocks.cpp sums a type's products."""
    return 17_045 if isa in ("avx2", "avx512") and stored in ("Q5_1", "Q5_K") else 32_767


def _rounding(isa: str, stored: str, x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """How far a result may be off, float64 [rows, outputs].

    Steps of 16 inputs are 1/127 of their largest, and what whole multiples of a row's unit add to that. By words those
    of all inputs are a unit.
    """
    half = x.double().abs().view(len(x), -1, 16).amax(2, keepdim=True)
    units = 32_767 if uses_int16_path(isa, stored) else 127 * _most_multiple(isa, stored)
    unit = (half.amax(1, keepdim=True) / units).clamp(min=2.0**-120)
    steps = (unit + (0 if uses_int16_path(isa, stored) else half / 127)).expand(-1, half.shape[1], 16).reshape(x.shape)
    return (0.50001 * steps + 2e-6 * x.double().abs()) @ plain.abs().T + 2.0**-149


@every("dtype", DTYPES)
@every("most", [1.0, 1e30, 1e-30, 1e-34, 1e-41, 0.0])
@every("stored", GGUF_TYPES)
def test_small_inputs_beside_large_ones_are_off_by_no_more_than_their_steps(
    isa: str, stored: str, most: float, dtype: torch.dtype
) -> None:
    weight = native_linear.GGUFWeight(_stored_rows(stored, 512), stored, 512)
    plain = weight.rows(torch.arange(40), torch.float32).double()
    sizes = torch.logspace(0, -7, 32)[torch.randperm(32, generator=torch.Generator().manual_seed(5))]
    x = (_matrix(23, 4, 512, torch.float32) * sizes.repeat_interleave(16) * most).to(dtype)
    exact, bound = x.double() @ plain.T, _rounding(isa, stored, x, plain)
    if dtype == torch.bfloat16:
        bound += (exact.abs() + bound) / 256
    assert bool(((weight.linear(x).double() - exact).abs() <= bound).all())


@every("stored", GGUF_TYPES)
def test_gguf_linear_is_as_near_as_inputs_of_8_or_of_16_bits_make_them(isa: str, stored: str) -> None:
    weight = native_linear.GGUFWeight(_stored_rows(stored, 512), stored, 512)
    x = _matrix(29, 8, 512, torch.float32)
    exact = x.double() @ weight.rows(torch.arange(40), torch.float32).double().T
    error = float((weight.linear(x).double() - exact).norm() / exact.norm())
    assert error <= (5e-5 if uses_int16_path(isa, stored) else 1e-2)


@every("stored", GGUF_TYPES)
def test_the_largest_floats_do_not_overflow_on_the_way(isa: str, stored: str) -> None:
    rows = _stored_rows(stored, 512)
    size = native_library.LIBRARY.srv_gguf_row_bytes(native_linear.GGML_TYPES[stored], 512)
    blocks = rows.view(40, -1, size // 2 if stored.endswith("_K") else size // 16)
    for at in _scales_at(stored):
        blocks[..., at] = torch.tensor([0, 4], dtype=torch.uint8)  # 2^-14
    weight = native_linear.GGUFWeight(rows, stored, 512)
    plain = weight.rows(torch.arange(40), torch.float32).double()
    x = torch.full((2, 512), 1e30)
    x[0, 40], x[1, 300] = 3.4e38, -3.4e38
    error = (weight.linear(x).double() - x.double() @ plain.T).abs()
    assert bool((error <= _rounding(isa, stored, x, plain)).all())


@every("bad", [float("nan"), float("inf")])
@every("stored", ["Q8_0", "Q5_0", "Q6_K", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q5_K"])
def test_blocks_keep_what_is_not_finite_in_its_row(isa: str, stored: str, bad: float) -> None:
    weight = native_linear.GGUFWeight(_stored_rows(stored, 512), stored, 512)
    x = _matrix(13, 3, 512, torch.float32)
    clean = weight.linear(x)
    x[1, 65] = bad
    got = weight.linear(x)
    assert not bool(got[1].isfinite().any())
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@native
def test_rows_that_do_not_hold_their_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="96 weights of type Q8_0 do not take 100 bytes"):
        native_linear.GGUFWeight(torch.zeros(4, 100, dtype=torch.uint8), "Q8_0", 96)


@native
@every("dtype", DTYPES)
def test_threads_of_several_callers_take_turns(dtype: torch.dtype) -> None:
    native_library.set_threads(3)
    layer = native_linear.linear(_matrix(11, 320, 64, dtype), None)
    x = _matrix(12, 8, 64, dtype)
    want = layer(x)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: [layer(x) for _ in range(200)], range(4)))
    native_library.set_threads(1)
    assert all(torch.equal(got, want) for several in results for got in several)


@native
def test_no_share_is_lost_or_done_twice_by_more_threads_than_cores() -> None:
    """Runs follow one another faster than threads wake up, so that some come to work that is over."""
    native_library.set_threads(9)
    x = _matrix(12, 3, 128, torch.float32)
    layers = [native_linear.linear(_matrix(seed, 352, 128, torch.float32), None) for seed in range(3)]
    wants = [layer(x) for layer in layers]
    for _ in range(1500):
        for layer, want in zip(layers, wants, strict=True):
            assert torch.equal(layer(x), want)
    native_library.set_threads(1)


@every("dtype", DTYPES)
def test_rows_enough_for_every_thread_to_prepare_some(isa: str, dtype: torch.dtype) -> None:
    """Inputs are widened, or rounded to bytes, by all threads before any of them multiplies."""
    rows, inputs = 160, 576
    x = _matrix(12, rows, inputs, dtype)
    weight = torch.randint(-128, 128, (96, inputs), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    layers = [
        native_linear.linear(_matrix(11, 96, inputs, dtype), None),
        native_linear.W8A8Linear(weight, torch.ones(96)),
    ]
    native_library.set_threads(3)
    together = [layer(x) for layer in layers]
    native_library.set_threads(1)
    for layer, got in zip(layers, together, strict=True):
        assert torch.equal(layer(x), got)


@native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_gets_threads_of_its_own() -> None:
    native_library.set_threads(2)
    layer = native_linear.linear(_matrix(11, 320, 64, torch.float32), None)
    x = _matrix(12, 8, 64, torch.float32)
    want = layer(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(layer(x), want) else 1)
    _, status = os.waitpid(child, 0)
    native_library.set_threads(1)
    assert os.waitstatus_to_exitcode(status) == 0


def _layers(
    outputs: int, inputs: int, bias: torch.Tensor | None = None
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Each kind of linear layer, with bfloat16 as its dtype where it has one of its own."""
    whole = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scales = torch.rand(outputs)
    blocks = native_linear.GGUFWeight(torch.zeros(outputs, inputs // 32 * 34, dtype=torch.uint8), "Q8_0", inputs)
    return [
        native_linear.linear(_matrix(1, outputs, inputs, torch.bfloat16), bias),
        native_linear.Int8WeightLinear(whole, scales, bias),
        native_linear.W8A8Linear(whole, scales, bias),
        native_linear.FusedGGUFLinear([blocks], bias),
    ]


@native
class TestWhatLinearLayersRefuse:
    """Kernels get addresses alone: what they would misread must not come to them."""

    def test_rows_that_cut_a_block(self) -> None:
        with pytest.raises(ValueError, match="288 weights of type Q4_K do not take 144 bytes"):
            native_linear.GGUFWeight(torch.zeros(40, 144, dtype=torch.uint8), "Q4_K", 288)

    def test_a_place_for_results_that_they_do_not_fit(self) -> None:
        weight = native_linear.GGUFWeight(torch.zeros(40, 68, dtype=torch.uint8), "Q8_0", 64)
        wide, x = torch.zeros(3, 80), torch.zeros(3, 64)
        assert weight.linear(x, out=wide[:, 40:]).data_ptr() == wide[:, 40:].data_ptr()
        for out in (wide[:2, :40], wide[:, :41], wide[:, ::2], wide[:, :40].bfloat16()):
            with pytest.raises(ValueError, match=r"it must be \[3, 40\], torch.float32"):
                weight.linear(x, out=out)

    def test_a_bias_of_blocks_of_another_length(self) -> None:
        weight = native_linear.GGUFWeight(torch.zeros(40, 68, dtype=torch.uint8), "Q8_0", 64)
        with pytest.raises(ValueError, match=r"bias has shape \(39,\), but the weight has 40 outputs"):
            weight.linear(torch.zeros(3, 64), torch.zeros(39))

    @every("columns", [63, 65])
    def test_rows_of_another_width(self, columns: int) -> None:
        for layer in _layers(40, 64):
            with pytest.raises(ValueError, match=f"x has {columns} columns, but the weight has 64"):
                layer(torch.zeros(2, columns, dtype=torch.bfloat16))

    def test_numbers_that_no_kernel_multiplies(self) -> None:
        for layer in _layers(40, 64):
            with pytest.raises(ValueError, match=r"x is torch.float16; the native kernels take torch.float32"):
                layer(torch.zeros(2, 64, dtype=torch.float16))

    def test_inputs_of_another_dtype_than_a_plain_weight(self) -> None:
        with pytest.raises(ValueError, match=r"x is torch.float32, but the weight is torch.bfloat16"):
            _layers(40, 64)[0](torch.zeros(2, 64))

    def test_a_bias_of_another_dtype_than_the_inputs(self) -> None:
        for layer in _layers(40, 64, torch.zeros(40)):
            with pytest.raises(ValueError, match=r"x is torch.bfloat16 with a bias of torch.float32"):
                layer(torch.zeros(2, 64, dtype=torch.bfloat16))

    def test_a_bias_or_scales_of_another_length(self) -> None:
        weight = torch.ones(40, 64, dtype=torch.int8)
        with pytest.raises(ValueError, match=r"bias has shape \(39,\), but the weight has 40 outputs"):
            native_linear.linear(weight.float(), torch.zeros(39))
        for kind in (native_linear.Int8WeightLinear, native_linear.W8A8Linear):
            with pytest.raises(ValueError, match=r"scales has shape \(41,\), but the weight has 40 outputs"):
                kind(weight, torch.ones(41))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestMostLikely:
    @every("vocab", [1, 15, 16, 17, 50, 1024, 4099])
    def test_the_largest_of_each_row(self, isa: str, threads: int, dtype: torch.dtype, vocab: int) -> None:
        wide = _matrix(1, 7, vocab + 3, dtype)
        for logits in (wide[:, :vocab], wide[:1, 3:].contiguous()):
            tokens, finite = native_ops.most_likely(logits)
            assert torch.equal(tokens, logits.float().argmax(-1))
            assert finite.all()

    @every("places", [(0, 16), (15, 16), (17, 33), (3, 48), (49, 50), (31, 49)])
    def test_equals_are_taken_by_their_place(self, isa: str, dtype: torch.dtype, places: tuple[int, int]) -> None:
        logits = torch.full((1, 51), -2.0, dtype=dtype)
        logits[0, list(places)] = -0.5
        assert native_ops.most_likely(logits)[0].tolist() == [places[0]]

    @every("bad", [torch.nan, torch.inf])
    @every("at", [0, 20, 49])
    def test_a_row_with_a_bad_value_is_told_and_harms_no_other(
        self, isa: str, dtype: torch.dtype, bad: float, at: int
    ) -> None:
        logits = _matrix(2, 3, 50, dtype)
        want = logits.float().argmax(-1)
        logits[1, at] = bad
        tokens, finite = native_ops.most_likely(logits)
        assert tokens.tolist() == [want[0], 0, want[2]]
        assert finite.tolist() == [True, False, True]

    def test_masked_values_are_passed_over_unless_there_is_nothing_else(self, isa: str, dtype: torch.dtype) -> None:
        logits = torch.full((2, 50), -torch.inf, dtype=dtype)
        logits[0, 37] = -1e30
        tokens, finite = native_ops.most_likely(logits)
        assert (tokens.tolist(), finite.tolist()) == ([37, 0], [True, False])


def _shares(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """float64 [V]: how probable each token is after temperature, top-k, top-p and min-p, in this order."""
    wide, order = logits.double() / temperature, logits.double().argsort(descending=True, stable=True)
    weights = (wide - wide.max()).exp()[order]
    weights[top_k:] = 0
    before = weights.cumsum(0) - weights
    if top_p < 1:
        weights[before >= top_p * weights.sum()] = 0
    weights[weights < min_p * weights[0]] = 0
    shares = torch.empty_like(weights)
    shares[order] = weights / weights.sum()
    return shares


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestDraw:
    ROWS = 40

    @every(
        ("temperature", "top_k", "top_p", "min_p"),
        [
            (1.0, 0, 1.0, 0.0),
            (0.3, 0, 1.0, 0.0),
            (1.0, 7, 1.0, 0.0),
            (1.0, 0, 0.9, 0.0),
            (2.0, 0, 1.0, 0.1),
            (0.8, 40, 0.8, 0.02),
            (0.02, 30, 1.0, 0.0),  # the last of thirty are further from the first than weights reach
            (1e6, 30, 0.5, 0.0),  # all are as probable
        ],
    )
    @every("vocab", [1, 17, 300, 4099])
    def test_noise_points_at_the_token(
        self,
        isa: str,
        threads: int,
        dtype: torch.dtype,
        vocab: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> None:
        """What is kept lies side by side, each token as wide as it is probable: by logit, or by id with no filter."""
        logits = (_matrix(1, 2, vocab, torch.float32) * 3).to(dtype)
        many = logits.repeat(self.ROWS // 2, 1)
        noise = torch.linspace(0, 1 - 2**-53, self.ROWS, dtype=torch.float64)
        top_k = min(top_k or vocab, vocab)
        columns = (torch.full((self.ROWS,), value) for value in (top_p, min_p))
        tokens = native_ops.draw(
            many,
            torch.full((self.ROWS,), temperature),
            torch.full((self.ROWS,), top_k, dtype=torch.int32),
            *columns,
            noise,
        )
        filtered = top_k < vocab or top_p < 1 or min_p > 0
        for row, (token, at) in enumerate(zip(tokens.tolist(), noise.tolist(), strict=True)):
            shares = _shares(logits[row % 2], temperature, top_k, top_p, min_p)
            by_logit = logits[row % 2].double().argsort(descending=True, stable=True)
            order = by_logit if filtered else torch.arange(vocab)
            end = float(shares[order].cumsum(0)[order == token])
            assert shares[token] > 0
            assert end - shares[token] - 1e-5 <= at <= end + 1e-5

    def test_rows_have_no_part_in_one_another(self, isa: str, threads: int, dtype: torch.dtype) -> None:
        count, vocab = 9, 1000
        logits = _matrix(3, count, vocab, dtype)
        temperature, top_p = torch.linspace(0, 2, count), torch.linspace(0.5, 1, count)
        top_k = torch.tensor([vocab, 1, 5, vocab, 50, vocab, 300, 999, vocab], dtype=torch.int32)
        min_p, noise = torch.linspace(0.2, 0, count), torch.rand(count, dtype=torch.float64)
        columns = (temperature, top_k, top_p, min_p, noise)
        together = native_ops.draw(logits, *columns)
        assert together[0] == logits[0].float().argmax()
        for row in range(count):
            alone = native_ops.draw(logits[row:][:1], *(column[row:][:1] for column in columns))
            assert alone == together[row]
        bad = logits.clone()
        bad[3, 20], bad[5] = torch.nan, -torch.inf
        harmed = native_ops.draw(bad, *columns)
        assert harmed[[3, 5]].tolist() == [0, 0]
        well = [0, 1, 2, 4, 6, 7, 8]
        assert torch.equal(harmed[well], together[well])


class TestLibrary:
    def test_a_library_that_is_not_there(self, tmp_path: Path) -> None:
        found = library.open_library(tmp_path / "none.so")
        assert found.library is None
        assert "python -m srv_kernels.cpu.build" in found.reason

    def test_a_file_that_is_no_library(self, tmp_path: Path) -> None:
        (tmp_path / "text.so").write_text("no library")
        assert "does not load" in library.open_library(tmp_path / "text.so").reason

    @native
    def test_another_interface(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
        assert f"has interface {library.ABI_VERSION - 1}, not" in library.open_library(library.PATH).reason

    @native
    def test_a_struct_that_the_two_sides_write_differently(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Longer(library.GgufRowsArgs):
            _fields_ = (("more", ctypes.c_int64),)

        monkeypatch.setattr(library, "_ARGS", (*library._ARGS[:-1], Longer))
        assert "has Longer of " in library.open_library(library.PATH).reason

    @native
    def test_an_instruction_set_that_nobody_has(self) -> None:
        assert "SRV_CPU_ISA=vax" in library.open_library(library.PATH, "vax").reason

    def test_asked_for_none(self) -> None:
        code = "from srv_kernels.cpu import library; print(library.load().reason)"
        environment = {**os.environ, "SRV_CPU_NATIVE": "0"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert "SRV_CPU_NATIVE=0" in done.stdout

    def test_a_machine_without_a_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(build.CannotBuild, match=r"install g\+\+"):
            build.compiler()

    def test_a_compiler_that_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(build.CannotBuild, match="status 1"):
            build.build(tmp_path / "x.so")
        assert not (tmp_path / "x.so").exists()

    def test_its_tests_over_another_library_do_not_pass_where_that_does_not_load(self, tmp_path: Path) -> None:
        (tmp_path / "text.so").write_text("no library")
        outcome = own_tests(tmp_path / "text.so")
        assert not outcome.passed
        assert "these tests would skip" in outcome.end
        assert "text.so does not load" in outcome.end
