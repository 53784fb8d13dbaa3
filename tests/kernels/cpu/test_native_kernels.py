"""The native CPU kernels, on every instruction set that this machine has."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from every import every
from native_again import own_tests
from native_cases import DTYPES, avx2_cases
from native_linear_checked import BLOCK_WEIGHTS, assert_linear, uses_int16_path

from srv.models.checkpoints.gguf_types import CODEBOOK_TYPES
from srv_kernels import oracles
from srv_kernels.cases import GGUF_BLOCKS
from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.cpu import build, library
from srv_matrix.pytest_plugin import covers

LOADED = library.load()
if LOADED.library is not None:
    from srv_kernels.cpu import native_library, native_linear, native_ops

# Tests are skipped one by one, so that pytest can collect their marks on a machine without a compiler.
NO_KERNELS = f"no native kernels here: {LOADED.reason}"
native = pytest.mark.skipif(LOADED.library is None, reason=NO_KERNELS)
GGUF_TYPES = tuple(native_linear.GGML_TYPES) if LOADED.library is not None else ("none",)
ISAS = tuple(build.isas())
CAPABILITIES = ("gguf_codebooks",)
OPS = (
    *("rms_norm", "add_rms_norm", "rotary", "silu_and_mul"),
    *("linear_w8a8", "linear_w8a8_static", "linear_int8", "linear_gguf", "linear_gguf_float32", "rows_gguf"),
)


@every("dtype", DTYPES)
@every("op", OPS)
def test_ops_keep_their_contract(isa: str, threads: int, op: str, dtype: torch.dtype) -> None:
    assert violations(CONTRACTS[op], getattr(native_ops, op), dtype, capabilities=CAPABILITIES) == []


@pytest.mark.parametrize("isa", ["avx2"], indirect=True)
@pytest.mark.parametrize(("op", "dtype"), avx2_cases(OPS, covers))
def test_a_newer_processor_made_to_take_the_path_of_avx2_keeps_the_contract(
    isa: str, op: str, dtype: torch.dtype
) -> None:
    assert LOADED.isa == isa
    assert violations(CONTRACTS[op], getattr(native_ops, op), dtype, capabilities=CAPABILITIES) == []


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


@every("rows", [1, 3, 13])
def test_results_in_float32_are_the_sums_before_they_are_rounded(isa: str, rows: int) -> None:
    x, weight, scales = _matrix(3, rows, 66, torch.bfloat16), _matrix(4, 45, 66, torch.bfloat16), torch.full((45,), 0.1)
    bias, int8 = _matrix(5, 1, 45, torch.bfloat16)[0], _int8(6, 45, 66)
    for kind in (
        lambda wide: native_linear.linear(weight, bias, float32_out=wide),
        lambda wide: native_linear.Int8WeightLinear(int8, scales, bias, float32_out=wide),
        lambda wide: native_linear.W8A8Linear(int8, scales, bias, float32_out=wide),
    ):
        rounded, sums = kind(False)(x), kind(True)(x)
        assert (rounded.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(sums.bfloat16(), rounded)
        assert not torch.equal(sums, rounded.float())


@every("spread", [1e-17, 1e18])
def test_magnitudes_near_the_ends_of_bfloat16(isa: str, spread: float) -> None:
    """Sums are a thousand times the smallest normal number, or a twentieth of the largest one."""
    _assert_linear(_matrix(7, 5, 64, torch.bfloat16, spread), _matrix(8, 64, 64, torch.bfloat16, spread), None)


@every("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(isa: str, dtype: torch.dtype) -> None:
    x, layer = _matrix(9, 30, 576, dtype), native_linear.linear(_matrix(10, 160, 576, dtype), None)
    together = layer(x)
    native_library.set_threads(3)
    for row in (0, 13, 29):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
    native_library.set_threads(1)


def _int8(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)


@every("dtype", DTYPES)
@every(("outputs", "inputs"), [(1, 1), (33, 7), (32, 4), (576, 576), (50, 1001)])
@every("rows", [0, 1, 3, 12, 13, 25])
def test_int8_linear_results_are_exact_sums(isa: str, outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    """x consists of integers, and the largest of each row is 127, so that its scale is 1."""
    x = torch.randint(-126, 127, (rows, inputs), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, -1] = 127
    weight = _int8(2, outputs, inputs)
    exact = x.double() @ weight.double().T
    assert torch.equal(native_linear.W8A8Linear(weight, torch.ones(outputs))(x), exact.to(dtype))
    int32_bias = torch.arange(outputs, dtype=torch.int32)
    shifted = native_linear.W8A8Linear(weight, torch.ones(outputs), int32_bias=int32_bias, static=(1.0, 1.0))(x - 1)
    assert torch.equal(shifted, (exact + int32_bias).to(dtype))


@every("dtype", DTYPES)
@every("static", [(0.0, 0.0), (32.0, 3.0)])
def test_a_w8a8_row_does_not_depend_on_the_batch_or_the_threads(
    isa: str, static: tuple[float, float], dtype: torch.dtype
) -> None:
    x = _matrix(9, 30, 200, dtype)[:, 3:180]  # rows of a wider matrix, at odd addresses
    layer = native_linear.W8A8Linear(_int8(10, 160, 177), torch.rand(160), static=static)
    together = layer(x)
    native_library.set_threads(3)
    for row in (0, 13, 29):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
    native_library.set_threads(1)


@every("dtype", DTYPES)
@every(("outputs", "inputs"), [(1, 1), (33, 7), (32, 4), (576, 576), (50, 1001)])
@every("rows", [0, 1, 3, 12, 13, 25])
def test_int8_weight_linear_results_are_exact_sums(
    isa: str, outputs: int, inputs: int, rows: int, dtype: torch.dtype
) -> None:
    """Inputs, weights, scales and biases are such that every product and sum is exact in both dtypes."""
    x = torch.randint(-9, 10, (rows, inputs), generator=torch.Generator().manual_seed(1)).to(dtype)
    weight, scales = _int8(2, outputs, inputs), 2.0 ** (torch.arange(outputs) % 5 - 2)
    bias = (torch.arange(outputs) % 7).to(dtype)
    exact = x.double() @ weight.double().T * scales
    assert torch.equal(native_linear.Int8WeightLinear(weight, scales)(x), exact.to(dtype))
    assert torch.equal(native_linear.Int8WeightLinear(weight, scales, bias)(x), (exact + bias.double()).to(dtype))


@every("dtype", DTYPES)
def test_an_int8_weight_row_does_not_depend_on_the_batch_or_the_threads(isa: str, dtype: torch.dtype) -> None:
    x = _matrix(9, 30, 200, dtype)[:, 3:180]  # rows of a wider matrix, at odd addresses
    layer = native_linear.Int8WeightLinear(_int8(10, 160, 177), torch.rand(160))
    together = layer(x)
    native_library.set_threads(3)
    for row in (0, 13, 29):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
    native_library.set_threads(1)


@every("bad", [float("nan"), float("inf")])
def test_non_finite_inputs_affect_only_their_row_with_int8_weights(isa: str, bad: float) -> None:
    x = _matrix(13, 3, 70, torch.float32)
    layer = native_linear.Int8WeightLinear(_int8(14, 40, 70) | 1, torch.ones(40))  # no weight is 0
    clean = layer(x)
    x[1, 65] = bad
    got = layer(x)
    assert not bool(got[1].isfinite().any())
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@every("bad", [float("nan"), float("inf")])
@every("static", [(0.0, 0.0), (32.0, 3.0)])
def test_non_finite_inputs_affect_only_their_row_with_w8a8(isa: str, bad: float, static: tuple[float, float]) -> None:
    x = _matrix(13, 3, 70, torch.float32)
    layer = native_linear.W8A8Linear(_int8(14, 40, 70), torch.ones(40), static=static)
    clean = layer(x)
    x[1, 65] = bad
    got = layer(x)
    assert not bool(got[1].isfinite().any())
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@every("dtype", DTYPES)
@every("stored", GGUF_TYPES)
@every("rows", [13, 45])
def test_gguf_linear_equals_a_product_with_dequantized_weights(
    isa: str, stored: str, dtype: torch.dtype, rows: int
) -> None:
    """Integers are quantized exactly if the largest of every 16 is 127.

    On the int16 path the largest must divide 32,767, as 217 does. For many rows, blocks of 4-bit weights are unpacked.
    """
    (case,) = [
        candidate
        for candidate in CONTRACTS["linear_gguf"].cases(dtype, 3)
        if candidate.label == f"{stored}, 5x512 to 70"
    ]
    weight = native_linear.GGUFWeight(case.args[1], stored, 512)
    largest = 217 if uses_int16_path(isa, stored) else 127
    x = torch.randint(1 - largest, largest, (rows, 512), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, ::16] = largest
    bias = _matrix(2, 1, 70, dtype)[0]
    dequantized = weight.rows(torch.arange(70), torch.float32).double()
    exact = oracles.dequantize_rows(case.args[1], stored)
    assert bool(((dequantized - exact).abs() <= 2.0**-11 * exact.abs().amax()).all())
    assert_linear(native_linear.FusedPackedLinear([weight], bias)(x), x, dequantized, bias)
    assert torch.equal(weight.linear(x[7:8])[0], weight.linear(x)[7])
    assert torch.equal(weight.linear(x[:12]), weight.linear(x)[:12])


@every("dtype", DTYPES)
@every("stored", ["Q4_0", "Q8_0", "NF4"])
@every("rows", [1, 33])
def test_gguf_linear_takes_columns_in_the_order_of_the_weight(
    isa: str, stored: str, dtype: torch.dtype, rows: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(512, generator=generator)
    plain, ordered = (
        native_linear.GGUFWeight(_contract_rows()[stored], stored, 512, columns=columns) for columns in (None, order)
    )
    x = torch.randn(rows, 512, generator=generator).to(dtype)
    assert torch.equal(ordered.linear(x), plain.linear(x[:, order]))


@functools.cache
def _contract_rows() -> dict[str, torch.Tensor]:
    """For each type, 70 rows of 512 random weights with finite scales, as in a file."""
    cases = {case.label: case.args[1] for case in CONTRACTS["linear_gguf"].cases(torch.float32, 3)}
    return {stored: cases[f"{stored}, 5x512 to 70"] for stored in native_linear.GGML_TYPES}


def _stored_rows(stored: str, inputs: int) -> torch.Tensor:
    """The first `inputs` columns of 40 rows of a type."""
    rows = _contract_rows()[stored]
    return rows[:40, : rows.shape[1] * inputs // 512].clone()


# The bytes of a scale of 2^-14, of types whose scales are not in half precision, or in parts of words (IQ1_M).
OTHER_SCALES = {
    **{"MXFP4": [128 - 14], "NF4": [0, 0, 128, 56], "FP4": [0, 0, 128, 56]},
    "IQ1_M": [0, 0, 0, 0, 0, 64, 0, 0],
}


def _blocks_of(rows: torch.Tensor, stored: str, inputs: int) -> torch.Tensor:
    """The rows by blocks: [40, blocks, bytes]."""
    weights = BLOCK_WEIGHTS[stored]
    return rows.view(40, inputs // weights, -1)


def _scales_at(stored: str) -> list[slice]:
    """The positions of a block's scales."""
    if stored in OTHER_SCALES:
        first = 48 if stored == "IQ1_M" else 0
        return [slice(first, first + len(OTHER_SCALES[stored]))]
    offsets = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    offsets |= {"TQ1_0": (52,), "TQ2_0": (64,)}
    starts = offsets.get(stored, (0, 2) if stored in ("Q4_1", "Q5_1") else (0,))
    return [slice(offset, offset + 2) for offset in starts]


@every("stored", CODEBOOK_TYPES)
def test_weights_of_codebooks_are_unpacked_bit_by_bit_as_by_the_gguf_library(isa: str, stored: str) -> None:
    """All indices and signs occur. Scales are powers of two, so that nothing is rounded, zero included."""
    weights, size, scales = GGUF_BLOCKS[stored]
    rows = torch.randint(0, 256, (67, 8, size), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    powers = torch.tensor([2.0**-14, 2.0**-8, 0.0, -1.0, 2.0**10, -(2.0**-3), 1.0, 2.0**-12]).half().view(torch.int16)
    for at in scales:
        rows[..., at : at + 2] = powers.view(torch.uint8).view(8, 2)
    if stored == "IQ1_M":
        for index in range(4):
            high = (powers.int() >> 4 * index & 15) << 4
            rows[..., 49 + 2 * index] = rows[..., 49 + 2 * index] & 15 | high.to(torch.uint8)
    rows = rows.view(67, -1)
    want = oracles.dequantize_rows(rows, stored).float()
    assert weights * 8 == want.shape[1]
    weight = native_linear.GGUFWeight(rows, stored, want.shape[1])
    assert torch.equal(weight.rows(torch.arange(67), torch.float32), want)
    picked = torch.randperm(2048, generator=torch.Generator().manual_seed(3))[:40]
    ones = torch.eye(2048)[picked]
    for count in (3, 40):  # with 40 rows, blocks are unpacked first
        torch.testing.assert_close(weight.linear(ones[:count]), want[:, picked[:count]].T, rtol=1e-6, atol=0)


@every("byte", [0, 127, 128, 255])
@every("stored", GGUF_TYPES)
def test_the_largest_inputs_and_quantized_weights_do_not_overflow(isa: str, stored: str, byte: int) -> None:
    """All bytes of a block except its scales are equal; all inputs have the largest magnitude, with various signs."""
    rows = _stored_rows(stored, 256)
    blocks = _blocks_of(rows, stored, 256)
    scales = [blocks[..., at].clone() for at in _scales_at(stored)]
    blocks.fill_(byte)
    for at, scale in zip(_scales_at(stored), scales, strict=True):
        blocks[..., at] = scale
    if stored == "Q6_K":
        blocks[..., 192:208] = 1  # integer scales of groups; if they were 0, all weights would be 0
    weight = native_linear.GGUFWeight(rows, stored, 256)
    dequantized = weight.rows(torch.arange(40), torch.float32).double()
    x = 127 * torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 0.0]]).repeat(1, 128)
    exact, magnitude = x.double() @ dequantized.T, x.double().abs() @ dequantized.abs().T
    assert bool(((weight.linear(x).double() - exact).abs() <= 2e-6 * magnitude).all())


@every("dtype", DTYPES)
@every("stored", GGUF_TYPES)
@every(("rows", "threads"), [(13, 1), (45, 3)])
def test_a_gguf_row_does_not_depend_on_its_batch(
    isa: str, stored: str, dtype: torch.dtype, rows: int, threads: int
) -> None:
    """With few rows, and with so many that blocks are unpacked, also if a thread starts within a block."""
    native_library.set_threads(threads)
    for inputs in (512, 256):
        weight = native_linear.GGUFWeight(_stored_rows(stored, inputs), stored, inputs)
        x = _matrix(17, rows, inputs, dtype)
        together = weight.linear(x)
        for row in (0, 5, 7, 12):
            assert torch.equal(weight.linear(x[row : row + 1])[0], together[row])
        assert torch.equal(weight.linear(x[rows - 4 :]), together[rows - 4 :])


def _max_sub_scale(isa: str, stored: str) -> int:
    """The largest sub_scale of gguf_linear.cpp, which depends on how it sums a type's products."""
    return 17_045 if isa in ("avx2", "avx512") and stored in ("Q5_1", "Q5_K") else 32_767


def _rounding(isa: str, stored: str, x: torch.Tensor, dequantized: torch.Tensor) -> torch.Tensor:
    """The largest allowed error of each result, float64 [rows, outputs].

    The scale of 16 inputs is 1/127 of their largest, rounded up to an integer multiple of the row's scale. On the int16
    path, all inputs have the row's scale.
    """
    half = x.double().abs().view(len(x), -1, 16).amax(2, keepdim=True)
    levels = 32_767 if uses_int16_path(isa, stored) else 127 * _max_sub_scale(isa, stored)
    row_scale = (half.amax(1, keepdim=True) / levels).clamp(min=2.0**-120)
    added = 0 if uses_int16_path(isa, stored) else half / 127
    scales = (row_scale + added).expand(-1, half.shape[1], 16).reshape(x.shape)
    return (0.50001 * scales + 2e-6 * x.double().abs()) @ dequantized.abs().T + 2.0**-149


@every("dtype", DTYPES)
@every("largest", [1.0, 1e30, 1e-30, 1e-34, 1e-41, 0.0])
@every("stored", GGUF_TYPES)
def test_errors_of_small_inputs_next_to_large_ones_are_bounded_by_their_scale(
    isa: str, stored: str, largest: float, dtype: torch.dtype
) -> None:
    weight = native_linear.GGUFWeight(_stored_rows(stored, 512), stored, 512)
    dequantized = weight.rows(torch.arange(40), torch.float32).double()
    sizes = torch.logspace(0, -7, 32)[torch.randperm(32, generator=torch.Generator().manual_seed(5))]
    x = (_matrix(23, 4, 512, torch.float32) * sizes.repeat_interleave(16) * largest).to(dtype)
    exact, bound = x.double() @ dequantized.T, _rounding(isa, stored, x, dequantized)
    if dtype == torch.bfloat16:
        bound += (exact.abs() + bound) / 256
    assert bool(((weight.linear(x).double() - exact).abs() <= bound).all())


@every("stored", GGUF_TYPES)
def test_gguf_linear_error_is_that_of_quantized_inputs(isa: str, stored: str) -> None:
    weight = native_linear.GGUFWeight(_stored_rows(stored, 512), stored, 512)
    x = _matrix(29, 8, 512, torch.float32)
    exact = x.double() @ weight.rows(torch.arange(40), torch.float32).double().T
    error = float((weight.linear(x).double() - exact).norm() / exact.norm())
    assert error <= (5e-5 if uses_int16_path(isa, stored) else 1e-2)


@every("stored", GGUF_TYPES)
def test_intermediate_results_of_the_largest_floats_do_not_overflow(isa: str, stored: str) -> None:
    rows = _stored_rows(stored, 512)
    blocks = _blocks_of(rows, stored, 512)
    for at in _scales_at(stored):
        blocks[..., at] = torch.tensor(OTHER_SCALES.get(stored, [0, 4]), dtype=torch.uint8)  # 2^-14
    weight = native_linear.GGUFWeight(rows, stored, 512)
    dequantized = weight.rows(torch.arange(40), torch.float32).double()
    x = torch.full((2, 512), 1e30)
    x[0, 40], x[1, 300] = 3.4e38, -3.4e38
    error = (weight.linear(x).double() - x.double() @ dequantized.T).abs()
    assert bool((error <= _rounding(isa, stored, x, dequantized)).all())


@every("bad", [float("nan"), float("inf")])
@every("stored", ["Q8_0", "Q5_0", "Q6_K", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q5_K", "MXFP4", "NF4", "TQ1_0", "IQ2_XS"])
def test_non_finite_inputs_affect_only_their_row_with_gguf_weights(isa: str, stored: str, bad: float) -> None:
    weight = native_linear.GGUFWeight(_stored_rows(stored, 512), stored, 512)
    x = _matrix(13, 3, 512, torch.float32)
    clean = weight.linear(x)
    x[1, 65] = bad
    got = weight.linear(x)
    assert not bool(got[1].isfinite().any())
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@native
def test_gguf_rows_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match="96 weights of type Q8_0 do not take 100 bytes"):
        native_linear.GGUFWeight(torch.zeros(4, 100, dtype=torch.uint8), "Q8_0", 96)


@native
@every("dtype", DTYPES)
def test_concurrent_callers_are_serialized(dtype: torch.dtype) -> None:
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
def test_every_chunk_runs_once_with_more_threads_than_cores() -> None:
    """Kernels follow each other so fast that some threads wake up after their kernel has ended."""
    native_library.set_threads(9)
    x = _matrix(12, 3, 128, torch.float32)
    layers = [native_linear.linear(_matrix(seed, 352, 128, torch.float32), None) for seed in range(3)]
    wants = [layer(x) for layer in layers]
    for _ in range(1500):
        for layer, want in zip(layers, wants, strict=True):
            assert torch.equal(layer(x), want)
    native_library.set_threads(1)


@every("dtype", DTYPES)
def test_all_threads_prepare_inputs_before_any_multiplies(isa: str, dtype: torch.dtype) -> None:
    """All threads widen or quantize inputs before any of them multiplies."""
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
def test_a_forked_child_has_its_own_threads() -> None:
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
    """Each kind of linear layer; the one with a float weight is in bfloat16."""
    int8_weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scales = torch.rand(outputs)
    blocks = native_linear.GGUFWeight(torch.zeros(outputs, inputs // 32 * 34, dtype=torch.uint8), "Q8_0", inputs)
    return [
        native_linear.linear(_matrix(1, outputs, inputs, torch.bfloat16), bias),
        native_linear.Int8WeightLinear(int8_weight, scales, bias),
        native_linear.W8A8Linear(int8_weight, scales, bias),
        native_linear.FusedPackedLinear([blocks], bias),
    ]


@native
class TestRefusalsOfLinearLayers:
    """Kernels get only addresses, so that layers must refuse tensors that kernels would misread."""

    def test_rows_that_are_not_whole_blocks(self) -> None:
        with pytest.raises(ValueError, match="288 weights of type Q4_K do not take 144 bytes"):
            native_linear.GGUFWeight(torch.zeros(40, 144, dtype=torch.uint8), "Q4_K", 288)

    def test_out_of_a_wrong_shape_or_dtype(self) -> None:
        weight = native_linear.GGUFWeight(torch.zeros(40, 68, dtype=torch.uint8), "Q8_0", 64)
        wide, x = torch.zeros(3, 80), torch.zeros(3, 64)
        assert weight.linear(x, out=wide[:, 40:]).data_ptr() == wide[:, 40:].data_ptr()
        for out in (wide[:2, :40], wide[:, :41], wide[:, ::2], wide[:, :40].bfloat16()):
            with pytest.raises(ValueError, match=r"it must be \[3, 40\], torch.float32"):
                weight.linear(x, out=out)

    @every("columns", [[*range(63), 64], [*range(63), -1], [*range(63)]])
    def test_columns_that_x_does_not_have(self, columns: list[int]) -> None:
        rows = torch.zeros(40, 68, dtype=torch.uint8)
        with pytest.raises(ValueError, match="must be 64 columns of x, from 0 on"):
            native_linear.GGUFWeight(rows, "Q8_0", 64, columns=torch.tensor(columns))

    def test_gguf_bias_of_a_wrong_length(self) -> None:
        weight = native_linear.GGUFWeight(torch.zeros(40, 68, dtype=torch.uint8), "Q8_0", 64)
        with pytest.raises(ValueError, match=r"bias has shape \(39,\), but the weight has 40 outputs"):
            weight.linear(torch.zeros(3, 64), torch.zeros(39))

    @every("columns", [63, 65])
    def test_inputs_of_a_wrong_width(self, columns: int) -> None:
        for layer in _layers(40, 64):
            with pytest.raises(ValueError, match=f"x has {columns} columns, but the weight has 64"):
                layer(torch.zeros(2, columns, dtype=torch.bfloat16))

    def test_inputs_of_an_unsupported_dtype(self) -> None:
        for layer in _layers(40, 64):
            with pytest.raises(ValueError, match=r"x is torch.float16; the native kernels take torch.float32"):
                layer(torch.zeros(2, 64, dtype=torch.float16))

    def test_inputs_of_another_dtype_than_the_weight(self) -> None:
        with pytest.raises(ValueError, match=r"x is torch.float32, but the weight is torch.bfloat16"):
            _layers(40, 64)[0](torch.zeros(2, 64))

    def test_bias_of_another_dtype_than_the_inputs(self) -> None:
        for layer in _layers(40, 64, torch.zeros(40)):
            with pytest.raises(ValueError, match=r"x is torch.bfloat16 with a bias of torch.float32"):
                layer(torch.zeros(2, 64, dtype=torch.bfloat16))

    def test_bias_or_scales_of_a_wrong_length(self) -> None:
        weight = torch.ones(40, 64, dtype=torch.int8)
        with pytest.raises(ValueError, match=r"bias has shape \(39,\), but the weight has 40 outputs"):
            native_linear.linear(weight.float(), torch.zeros(39))
        for kind in (native_linear.Int8WeightLinear, native_linear.W8A8Linear):
            with pytest.raises(ValueError, match=r"scales has shape \(41,\), but the weight has 40 outputs"):
                kind(weight, torch.ones(41))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestMostLikely:
    @every("vocab", [1, 15, 16, 17, 50, 1024, 4099])
    def test_argmax_of_each_row(self, isa: str, threads: int, dtype: torch.dtype, vocab: int) -> None:
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
    def test_a_row_with_a_non_finite_logit_is_reported_and_affects_no_other(
        self, isa: str, dtype: torch.dtype, bad: float, at: int
    ) -> None:
        logits = _matrix(2, 3, 50, dtype)
        want = logits.float().argmax(-1)
        logits[1, at] = bad
        tokens, finite = native_ops.most_likely(logits)
        assert tokens.tolist() == [want[0], 0, want[2]]
        assert finite.tolist() == [True, False, True]

    def test_masked_logits_are_not_chosen(self, isa: str, dtype: torch.dtype) -> None:
        logits = torch.full((2, 50), -torch.inf, dtype=dtype)
        logits[0, 37] = -1e30
        tokens, finite = native_ops.most_likely(logits)
        assert (tokens.tolist(), finite.tolist()) == ([37, 0], [True, False])


def _probabilities(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """float64 [V]: the probability of each token after temperature, top-k, top-p and min-p, in this order."""
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
            (0.02, 30, 1.0, 0.0),  # the weights of the last of the thirty are 0
            (1e6, 30, 0.5, 0.0),  # all tokens are equally probable
        ],
    )
    @every("vocab", [1, 17, 300, 4099])
    def test_random_number_determines_the_token(
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
        """The kept tokens divide [0, 1) by their probabilities: in the order of logits, or without a filter of ids."""
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
            shares = _probabilities(logits[row % 2], temperature, top_k, top_p, min_p)
            by_logit = logits[row % 2].double().argsort(descending=True, stable=True)
            order = by_logit if filtered else torch.arange(vocab)
            end = float(shares[order].cumsum(0)[order == token])
            assert shares[token] > 0
            assert end - shares[token] - 1e-5 <= at <= end + 1e-5

    def test_rows_do_not_depend_on_each_other(self, isa: str, threads: int, dtype: torch.dtype) -> None:
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
        with_bad_rows = native_ops.draw(bad, *columns)
        assert with_bad_rows[[3, 5]].tolist() == [0, 0]
        valid = [0, 1, 2, 4, 6, 7, 8]
        assert torch.equal(with_bad_rows[valid], together[valid])


class TestLibrary:
    def test_a_missing_library(self, tmp_path: Path) -> None:
        result = library.open_library(tmp_path / "none.so")
        assert result.library is None
        assert "python -m srv_kernels.cpu.build" in result.reason

    def test_a_file_that_is_not_a_library(self, tmp_path: Path) -> None:
        (tmp_path / "text.so").write_text("no library")
        assert "does not load" in library.open_library(tmp_path / "text.so").reason

    @native
    def test_another_abi_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
        assert f"has interface {library.ABI_VERSION - 1}, not" in library.open_library(library.PATH).reason

    @native
    def test_a_struct_of_a_different_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Longer(library.GgufRowsArgs):
            _fields_ = (("more", ctypes.c_int64),)

        monkeypatch.setattr(library, "_ARGS", (*library._ARGS[:-1], Longer))
        assert "has Longer of " in library.open_library(library.PATH).reason

    @native
    def test_an_unknown_instruction_set(self) -> None:
        assert "SRV_CPU_ISA=vax" in library.open_library(library.PATH, "vax").reason

    def test_the_library_can_be_disabled(self) -> None:
        code = "from srv_kernels.cpu import library; print(library.load().reason)"
        environment = {**os.environ, "SRV_CPU_NATIVE": "0"}
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert "SRV_CPU_NATIVE=0" in process.stdout

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

    def test_tests_of_another_library_fail_if_it_does_not_load(self, tmp_path: Path) -> None:
        (tmp_path / "text.so").write_text("no library")
        outcome = own_tests(tmp_path / "text.so", isas=1)
        assert not outcome.passed
        assert "these tests would skip" in outcome.end
        assert "text.so does not load" in outcome.end
