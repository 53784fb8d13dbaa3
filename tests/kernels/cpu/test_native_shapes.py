"""The native kernels on random shapes, on every instruction set that the machine has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_cases import normal
from native_linear_checked import BLOCK_WEIGHTS, assert_linear, uses_int16_path

from srv_kernels.cases import Case
from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.cpu import library

LOADED = library.load()
if LOADED.library is not None:
    from srv_kernels.cpu import native_library, native_linear, native_ops

pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no native kernels here: {LOADED.reason}")
anything = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = st.sampled_from((torch.float32, torch.bfloat16))
ROWS = st.integers(0, 40)
WIDTHS = st.integers(1, 700)
PADDING = st.integers(0, 5)  # columns of the matrix that rows are views into, before and after them
THREADS = st.integers(1, 4)
SEEDS = st.integers(0, 1000)


def _integers(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def _view(wide: torch.Tensor, padding: int) -> torch.Tensor:
    return wide[:, padding : wide.shape[1] - padding]


def _violations(op: str, dtype: torch.dtype, *args: Any) -> list[str]:
    contract = replace(CONTRACTS[op], cases=lambda dtype, seed: iter([Case("random", args)]))
    return violations(contract, getattr(native_ops, op), dtype)


@anything
@given(rows=ROWS, dim=WIDTHS, padding=PADDING, dtype=DTYPES, threads=THREADS, seed=SEEDS)
def test_norms_and_silu_and_mul(
    isa: str, rows: int, dim: int, padding: int, dtype: torch.dtype, threads: int, seed: int
) -> None:
    native_library.set_threads(threads)
    x, residual = (_view(normal(seed + n, rows, dim + 2 * padding).to(dtype), padding) for n in range(2))
    gates = _view(normal(seed, rows, 2 * dim + 2 * padding).to(dtype), padding)
    weight = normal(seed + 2, dim).to(dtype)
    assert _violations("rms_norm", dtype, x, weight, 1e-5) == []
    assert _violations("add_rms_norm", dtype, x, residual, weight, 1e-5) == []
    assert _violations("silu_and_mul", dtype, gates) == []


@anything
@given(
    tokens=ROWS,
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 4),
    halves=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    dtype=DTYPES,
    threads=THREADS,
    seed=SEEDS,
)
def test_rotary(
    isa: str,
    tokens: int,
    heads: int,
    kv_heads: int,
    halves: tuple[int, int],
    dtype: torch.dtype,
    threads: int,
    seed: int,
) -> None:
    """The heads of a token are contiguous, as in the output of a fused linear layer."""
    native_library.set_threads(threads)
    rotated, dim = 2 * min(halves), 2 * max(halves)
    both = normal(seed, tokens, (heads + kv_heads) * dim).to(dtype)
    q, k = both[:, : heads * dim].view(tokens, heads, dim), both[:, heads * dim :].view(tokens, kv_heads, dim)
    angles = normal(seed + 1, 50, rotated // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    assert _violations("rotary", dtype, q, k, cos_sin, _integers(seed + 2, 0, 49, tokens)) == []


@anything
@given(
    rows=ROWS,
    inputs=WIDTHS,
    outputs=st.integers(1, 200),
    padding=PADDING,
    bias=st.booleans(),
    dtype=DTYPES,
    threads=THREADS,
    seed=SEEDS,
)
def test_linear(
    isa: str,
    rows: int,
    inputs: int,
    outputs: int,
    padding: int,
    bias: bool,
    dtype: torch.dtype,
    threads: int,
    seed: int,
) -> None:
    """Float weights with a tolerance, and int8 weights with integer inputs, whose sums are exact in float32."""
    native_library.set_threads(threads)
    x = _view(normal(seed, rows, inputs + 2 * padding).to(dtype), padding)
    weight, added = normal(seed + 1, outputs, inputs).to(dtype), _integers(seed + 2, -9, 9, outputs).to(dtype)
    offset = added if bias else None
    assert_linear(native_linear.linear(weight, offset)(x), x, weight, offset)

    int8_weight, scales = (
        _integers(seed + 3, -128, 127, outputs, inputs).to(torch.int8),
        2.0 ** (torch.arange(outputs) % 5 - 2),
    )
    small = _view(_integers(seed + 4, -9, 9, rows, inputs + 2 * padding).to(dtype), padding)
    exact = small.double() @ int8_weight.double().T * scales + (added.double() if bias else 0.0)
    assert torch.equal(native_linear.Int8WeightLinear(int8_weight, scales, offset)(small), exact.to(dtype))

    inputs_of_127 = _view(_integers(seed + 5, -126, 126, rows, inputs + 2 * padding).to(dtype), padding)
    inputs_of_127[:, -1] = 127  # so that the scale of the row is 1
    exact = inputs_of_127.double() @ int8_weight.double().T * scales + (added.double() if bias else 0.0)
    assert torch.equal(native_linear.W8A8Linear(int8_weight, scales, offset)(inputs_of_127), exact.to(dtype))


@pytest.mark.parametrize("stored", native_linear.GGML_TYPES if LOADED.library is not None else ())
@anything
@given(
    rows=ROWS,
    blocks=st.integers(1, 5),
    outputs=st.integers(1, 80),
    padding=PADDING,
    bias=st.booleans(),
    dtype=DTYPES,
    threads=THREADS,
    seed=SEEDS,
)
def test_gguf_linear(
    isa: str,
    stored: str,
    rows: int,
    blocks: int,
    outputs: int,
    padding: int,
    bias: bool,
    dtype: torch.dtype,
    threads: int,
    seed: int,
) -> None:
    """Integers are quantized exactly if the largest of every 16 is 127, or 217 on the int16 path of gguf_linear.cpp."""
    native_library.set_threads(threads)
    inputs = blocks * BLOCK_WEIGHTS[stored]
    (case,) = [
        candidate
        for candidate in CONTRACTS["linear_gguf"].cases(dtype, 3)
        if candidate.label == f"{stored}, 5x512 to 70"
    ]
    blocks_of_case = case.args[1].reshape(-1, case.args[1].shape[1] * inputs // 512 // blocks)
    stored_rows = blocks_of_case[_integers(seed, 0, len(blocks_of_case) - 1, outputs, blocks)].reshape(outputs, -1)
    weight = native_linear.GGUFWeight(stored_rows, stored, inputs)
    dequantized = weight.rows(torch.arange(outputs), torch.float32).double()
    largest = 217 if uses_int16_path(isa, stored) else 127
    x = _view(_integers(seed + 1, 1 - largest, largest - 1, rows, inputs + 2 * padding).to(dtype), padding)
    x[:, ::16] = largest
    offset = _integers(seed + 2, -9, 9, outputs).to(dtype) if bias else None
    assert_linear(native_linear.FusedPackedLinear([weight], offset)(x), x, dequantized, offset)


def test_gguf_linear_with_inputs_of_three_dimensions() -> None:
    """All dimensions but the last are rows, for one weight and for several."""
    rows = torch.arange(40 * 68).reshape(40, 68).remainder(97).to(torch.uint8)
    weights = [native_linear.GGUFWeight(rows, "Q8_0", 64) for _ in range(2)]
    x = normal(1, 2, 3, 64)
    one = native_linear.FusedPackedLinear(weights[:1])(x)
    assert one.shape == (6, 40)
    assert torch.equal(native_linear.FusedPackedLinear(weights)(x), torch.cat((one, one), 1))
