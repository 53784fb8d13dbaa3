"""The native kernels with FP8 weights, on every instruction set that this machine has."""

from __future__ import annotations

import pytest
import torch
from every import every
from native_cases import DTYPES, avx2_cases, normal

from srv_kernels.cases import random_fp8
from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.cpu import library
from srv_kernels.cpu.captured_graph import CapturedGraph, GraphMemoryPool
from srv_kernels.oracles import dequantize_fp8
from srv_matrix.pytest_plugin import covers

LOADED = library.load()
if LOADED.library is not None:
    from srv_kernels.cpu import native_fp8, native_library, native_linear
    from srv_kernels.cpu.native_fp8 import Fp8Weight

pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no native kernels here: {LOADED.reason}")
OPS = ("linear_fp8", "experts_fp8")


@every("dtype", DTYPES)
@every("op", OPS)
def test_ops_keep_their_contract(isa: str, threads: int, op: str, dtype: torch.dtype) -> None:
    assert violations(CONTRACTS[op], getattr(native_fp8, op), dtype) == []


@pytest.mark.parametrize("isa", ["avx2"], indirect=True)
@pytest.mark.parametrize(("op", "dtype"), avx2_cases(OPS, covers))
def test_a_newer_processor_made_to_take_the_path_of_avx2_keeps_the_contract(
    isa: str, op: str, dtype: torch.dtype
) -> None:
    assert LOADED.isa == isa
    assert violations(CONTRACTS[op], getattr(native_fp8, op), dtype) == []


@every("dtype", DTYPES)
def test_every_finite_value_is_read_exactly(isa: str, dtype: torch.dtype) -> None:
    """Rows of the identity matrix, so that each result is one weight; zeros and subnormal values are among them.

    Few rows convert weights where they multiply, many rows beforehand.
    """
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    weight = codes.view(torch.float8_e4m3fn).unsqueeze(1).expand(-1, 6).contiguous()
    packed = Fp8Weight(weight, torch.ones(1, 1), len(codes), 6)
    for times in (1, 10):
        product = packed.linear(torch.eye(6, dtype=dtype).repeat(times, 1))
        assert torch.equal(product, weight.t().to(dtype).repeat(times, 1))


@every("dtype", DTYPES)
@every("blocks", [(1, 1 << 20), (128, 128), (48, 32)])
def test_a_row_does_not_depend_on_the_batch_or_the_threads(
    isa: str, blocks: tuple[int, int], dtype: torch.dtype
) -> None:
    """With 1,024 inputs, many rows are copied to where they do not replace each other in the L1 cache."""
    generator = torch.Generator().manual_seed(1)
    for inputs in (333, 1024):
        native_library.set_threads(1)
        weight = random_fp8(generator, 70, inputs)
        scale = torch.rand(-(-70 // blocks[0]), -(-inputs // blocks[1]), generator=generator)
        packed = Fp8Weight(weight, scale, *blocks)
        x = normal(2, 51, inputs).to(dtype)
        together = packed.linear(x)
        native_library.set_threads(3)
        for row in (0, 11, 26, 50):
            assert torch.equal(packed.linear(x[row : row + 1])[0], together[row])


def test_results_in_float32_are_the_sums_and_parts_are_written_side_by_side(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    first, second = random_fp8(generator, 45, 64), random_fp8(generator, 20, 64)
    scales = [torch.rand(2, 2, generator=generator), torch.rand(1, 2, generator=generator)]
    x, bias = normal(4, 3, 64).bfloat16(), normal(5, 65).bfloat16()
    weights = [Fp8Weight(weight, scale, 32, 32) for weight, scale in zip((first, second), scales, strict=True)]
    sums = native_linear.FusedPackedLinear(weights, bias, float32_out=True)(x)
    pairs = zip((first, second), scales, strict=True)
    wide = torch.cat([dequantize_fp8(weight, scale, 32, 32) for weight, scale in pairs])
    torch.testing.assert_close(sums.double(), x.double() @ wide.T + bias.double(), rtol=1e-4, atol=1e-2)
    assert torch.equal(native_linear.FusedPackedLinear(weights, bias)(x), sums.bfloat16())


def test_a_captured_step_is_replayed_with_new_inputs() -> None:
    weight = random_fp8(torch.Generator().manual_seed(6), 40, 64)
    packed, x = Fp8Weight(weight, torch.full((40, 1), 0.01), 1, 64), normal(7, 2, 64)
    with CapturedGraph(GraphMemoryPool()) as graph:
        out = packed.linear(x)
    assert graph.native_calls == 1
    x.copy_(normal(8, 2, 64))
    graph.replay()
    assert torch.equal(out, packed.linear(x))


def test_what_does_not_fit_is_refused() -> None:
    weight, one = random_fp8(torch.Generator().manual_seed(9), 33, 64), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"the scale has shape \[2, 2\].* need \[1, 2\]"):
        Fp8Weight(weight, one, 64, 32)
    with pytest.raises(ValueError, match=r"torch\.float8_e5m2"):
        Fp8Weight(weight.float().to(torch.float8_e5m2), one, 32, 32)
    with pytest.raises(ValueError, match="33 inputs, an odd number"):
        Fp8Weight(weight, one, 32, 33)
    with pytest.raises(ValueError, match="63 columns"):
        Fp8Weight(weight, one, 32, 32).linear(torch.zeros(1, 63))


def test_out_of_a_wrong_shape_or_dtype_is_refused() -> None:
    weight = Fp8Weight(torch.zeros(40, 64, dtype=torch.float8_e4m3fn), torch.ones(2, 2), 32, 32)
    wide, x = torch.ones(3, 80), torch.ones(3, 64)
    assert weight.linear(x, out=wide[:, 40:]).data_ptr() == wide[:, 40:].data_ptr()
    assert torch.equal(wide, torch.ones(3, 80).masked_fill(torch.arange(80) >= 40, 0))
    for out in (wide[:2, :40], wide[:, :41], wide[:, ::2], wide[:, :40].bfloat16()):
        with pytest.raises(ValueError, match=r"it must be \[3, 40\], torch.float32"):
            weight.linear(x, out=out)
    with pytest.raises(ValueError, match=r"it must be \[3, 40\], torch.float32"):
        weight.linear(x.bfloat16(), out=wide[:, :40].bfloat16(), float32_out=True)
