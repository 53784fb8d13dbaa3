"""Triton's products of FP8 weights with inputs that are quantized to FP8: the quantization, bit by bit, and the sums.

In Triton's interpreter, or on a GPU if TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import pytest
import torch
from every import every
from kernel_device import kernel_device
from torch import Tensor

from srv_kernels import oracles
from srv_kernels.cases import ALL_INPUTS, fp8_scales, random_fp8
from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.tolerances import TWO_ROUNDINGS

pytest.importorskip("triton", reason="Triton is not installed: pip install srv-kernels[triton]")
from srv_kernels.triton.fp8_products import EXACT_ROWS, quantize
from srv_kernels.triton.quantized_tuning import target
from srv_kernels.triton.targets import FLOAT8_DOTS

DEVICE = kernel_device()
FITS = DEVICE is not None and target() in {"interpreter", *FLOAT8_DOTS}
pytestmark = pytest.mark.skipif(not FITS, reason="no GPU that multiplies FP8 here: set TRITON_INTERPRET=1")

OPS = torch.ops.srv_triton
HALVES = (torch.bfloat16, torch.float16)
MANY = EXACT_ROWS + 44
# (outputs, inputs) that share a scale -> how many inputs of x do, of 333.
GROUPS = {(1, ALL_INPUTS): 333, (1 << 20, ALL_INPUTS): 333, (128, 128): 128, (48, 32): 32, (1, 64): 64, (2, 192): 64}


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _quantized(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """As float8_e4m3fn by PyTorch, with the scales [groups, rows]."""
    values, scales = list[Tensor](), list[Tensor]()
    for part in x.float().split(group, 1):
        scale = part.abs().amax(1) / 448
        values.append((part / torch.where(scale == 0, 1.0, scale)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn))
        scales.append(scale)
    return torch.cat(values, 1), torch.stack(scales)


def _dequantized(values: Tensor, scales: Tensor, group: int) -> Tensor:
    return values.double() * scales.double().repeat_interleave(group, 0)[: values.shape[1]].T


def _operands(block: tuple[int, int], outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scale and bias."""
    generator = torch.Generator().manual_seed(outputs)
    scale = fp8_scales(generator, -(-outputs // block[0]), -(-inputs // block[1]))
    return random_fp8(generator, outputs, inputs), scale, _random(3, outputs, dtype=dtype)


def _multiplied(x: Tensor, operands: tuple[Tensor, Tensor, Tensor], block: tuple[int, int]) -> Tensor:
    product: Tensor = OPS.linear_fp8_quantized(x.to(DEVICE), *(operand.to(DEVICE) for operand in operands), *block)
    return product.cpu()


@every("group", [32, 128, 333])
def test_inputs_are_rounded_as_by_torch(group: int) -> None:
    x = _random(1, 40, 333)
    x[0] = 0
    x[1, ::2] = 0
    x[2, 200] = 1e4  # an outlier, beside which others in its group become subnormal or zero
    x[3] *= 1e30
    x[4, 7] = torch.finfo(torch.bfloat16).max
    x[5] *= 1e-30
    for rows in (40, 1):
        values, scales = (tensor.cpu() for tensor in quantize(x[:rows].to(DEVICE), group))
        want, want_scales = _quantized(x[:rows], group)
        assert torch.equal(scales, want_scales)
        assert torch.equal(values.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.slow
@every("dtype", HALVES)
@every("block", GROUPS)
def test_many_rows_are_products_of_quantized_inputs(block: tuple[int, int], dtype: torch.dtype) -> None:
    """The oracle on inputs that PyTorch has quantized, in float64."""
    x, operands, group = _random(2, MANY, 333, dtype=dtype), _operands(block, 131, 333, dtype), GROUPS[block]
    x[7] = 0
    x[8, 100] = 300
    want = oracles.linear_fp8(_dequantized(*_quantized(x, group), group), *operands, *block)
    errors = (_multiplied(x, operands, block).double() - want).abs()
    tolerance = TWO_ROUNDINGS[dtype]
    assert bool((errors <= tolerance.relative * want.abs() + tolerance.scaled * want.abs().max()).all())
    rounding = (oracles.linear_fp8(x, *operands, *block) - want).abs()
    assert float(rounding.mean()) > 3 * float(errors.mean())  # the inputs have been quantized


def test_each_tile_has_the_scale_of_its_block() -> None:
    """Blocks of 128 x 128 with scales that differ by powers of two, whose products are exact in float32."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-7, 8, (MANY, 384), generator=generator).bfloat16()
    x[:, ::128] = 7  # the scale of every group is 7 / 448 = 1 / 64
    weight = torch.randint(-3, 4, (300, 384), generator=generator).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.arange(-4, 5).view(3, 3)
    product = _multiplied(x, (weight, scale, torch.zeros(300).bfloat16()), (128, 128))
    assert torch.equal(product, oracles.linear_fp8(x, weight, scale, None, 128, 128).bfloat16())


@every("dtype", HALVES)
def test_few_rows_are_not_quantized(dtype: torch.dtype) -> None:
    operands = _operands((128, 128), 40, 150, dtype)
    for rows in (0, 1, EXACT_ROWS):
        x = _random(5, rows, 150, dtype=dtype)
        exact = OPS.linear_fp8(x.to(DEVICE), *(operand.to(DEVICE) for operand in operands), 128, 128).cpu()
        assert torch.equal(_multiplied(x, operands, (128, 128)), exact)


@pytest.mark.slow
@every("dtype", HALVES)
def test_few_rows_keep_the_contract(dtype: torch.dtype) -> None:
    assert violations(CONTRACTS["linear_fp8"], OPS.linear_fp8_quantized, dtype, DEVICE) == []


@every("block", [(1, ALL_INPUTS), (128, 128)])
def test_a_row_that_is_not_finite_stays_so_and_affects_no_other(block: tuple[int, int]) -> None:
    x, operands = _random(6, MANY, 150), _operands(block, 40, 150, torch.bfloat16)
    want = _multiplied(x, operands, block)
    bad = (torch.nan, torch.inf, -torch.inf)
    for row, value in enumerate(bad):
        x[row, 130] = value
    product = _multiplied(x, operands, block)
    assert bool(product[: len(bad)].isnan().all())
    assert torch.equal(product[len(bad) :], want[len(bad) :])


def test_rows_may_be_views_and_a_weight_may_have_no_outputs() -> None:
    wide, operands = _random(7, MANY, 400), _operands((1, ALL_INPUTS), 33, 150, torch.bfloat16)
    assert torch.equal(
        _multiplied(wide[:, 40:190], operands, (1, ALL_INPUTS)),
        _multiplied(wide[:, 40:190].contiguous(), operands, (1, ALL_INPUTS)),
    )
    none = (torch.empty(0, 150, dtype=torch.float8_e4m3fn), torch.empty(0, 1), torch.empty(0).bfloat16())
    assert _multiplied(wide[:, :150], none, (1, ALL_INPUTS)).shape == (MANY, 0)
