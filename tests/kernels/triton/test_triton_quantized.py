"""Triton's linear layers with int8 and GGUF weights: their contracts, exact sums, and GGUF blocks bit by bit.

In Triton's interpreter, or on a GPU if TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import pytest
import torch
from every import every
from kernel_device import kernel_device
from torch import Tensor

from srv_kernels import oracles
from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.tolerances import DTYPES
from srv_kernels.triton.registration import INTERPRETED

pytest.importorskip("triton", reason="Triton is not installed: pip install srv-kernels[triton]")
from srv_kernels.triton import fp8_linear, gguf_linear, int8_linear  # noqa: F401  registers the operators
from srv_kernels.triton.gguf_blocks import LAYOUTS

DEVICE = kernel_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU here: set TRITON_INTERPRET=1 to interpret the kernels")

OPS = torch.ops.srv_triton
INT8_OPS = ("linear_w8a8", "linear_w8a8_static", "linear_int8")
ON_META = torch.device("meta")


@pytest.mark.slow
@every("dtype", DTYPES)
@every("op", [*INT8_OPS, "linear_fp8", "linear_gguf", "rows_gguf"])
def test_ops_keep_their_contract(op: str, dtype: torch.dtype) -> None:
    assert violations(CONTRACTS[op], getattr(OPS, op), dtype, DEVICE) == []


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _int8(seed: int, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8).to(DEVICE)


@every(("outputs", "inputs"), [(1, 1), (33, 7), (70, 1001)])
@every("rows", [1, 25])
def test_int8_sums_are_exact(outputs: int, inputs: int, rows: int) -> None:
    """x consists of integers, and the largest of each row is 127, so that its scale is 1."""
    x = torch.randint(-126, 127, (rows, inputs), generator=torch.Generator().manual_seed(1)).float().to(DEVICE)
    x[:, -1] = 127
    weight, ones = _int8(2, outputs, inputs), torch.ones(outputs, device=DEVICE)
    exact = (x.double() @ weight.double().T).float()
    assert torch.equal(OPS.linear_w8a8(x, weight, ones, None), exact)
    added = torch.arange(outputs, dtype=torch.int32, device=DEVICE)
    static = (torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE), added, ones)
    assert torch.equal(OPS.linear_w8a8_static(x - 1, weight, *static), exact + added)


def test_static_quantization_rounds_ties_to_even_and_saturates() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 400.0, -128.5, -400.0]], device=DEVICE)
    one, no_bias = torch.ones(1, device=DEVICE), torch.zeros(10, dtype=torch.int32, device=DEVICE)
    identity, scale = torch.eye(10, dtype=torch.int8, device=DEVICE), torch.ones(10, device=DEVICE)
    got = OPS.linear_w8a8_static(x, identity, one, 0 * one, no_bias, scale)
    assert got.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -128, -128]]


def test_a_w8a8_row_does_not_depend_on_the_others() -> None:
    x, weight, scale = _random(3, 130, 300), _int8(4, 40, 300), _random(5, 40).abs()
    together = OPS.linear_w8a8(x, weight, scale, None)
    for row in (0, 13, 129):
        assert torch.equal(OPS.linear_w8a8(x[row : row + 1], weight, scale, None)[0], together[row])


@every("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_affects_no_other(bad: float) -> None:
    x, weight, scale = _random(6, 3, 64), _int8(7, 32, 64), _random(8, 32).abs()
    want = OPS.linear_w8a8(x, weight, scale, None)
    x[1, 40] = bad
    got = OPS.linear_w8a8(x, weight, scale, None)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], want[[0, 2]])


def _blocks(seed: int, outputs: int, blocks: int, quant_type: str) -> Tensor:
    """Rows of random bytes, but with finite scales of any magnitude."""
    layout = LAYOUTS[quant_type]
    shape = (outputs, blocks * layout.bytes)
    rows = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if quant_type == "MXFP4":  # exponents of which no product is infinite
        exponents = torch.randint(4, 251, (outputs, blocks), generator=torch.Generator().manual_seed(seed))
        rows.view(outputs, blocks, -1)[..., 0] = exponents.to(torch.uint8)
        return rows.to(DEVICE)
    halves = rows.view(torch.int16)  # a byte of a scale is never 0x7C to 0x7F, nor 0xFC to 0xFF
    halves[(halves & 0x7C00) == 0x7C00] &= ~0x4000
    return rows.to(DEVICE)


@every("quant_type", LAYOUTS)
def test_blocks_are_read_bit_by_bit_as_by_the_gguf_library(quant_type: str) -> None:
    rows = _blocks(9, 6, 3 if quant_type.endswith("K") else 9, quant_type)
    if quant_type == "MXFP4" and INTERPRETED:  # subnormal numbers, which GPUs may flush
        rows[0, 0], rows[0, 17] = 0, 1
    got = OPS.rows_gguf(rows, quant_type, torch.arange(6, device=DEVICE), torch.float32).cpu()
    want = oracles.dequantize_rows(rows, quant_type).float()
    assert want.isfinite().all()
    assert len(want.unique()) > (150 if quant_type == "MXFP4" else 400)
    if INTERPRETED:
        assert torch.equal(got, want)
    else:  # compiled code fuses the multiplication and the addition
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7 * float(want.abs().max()))


@every("quant_type", LAYOUTS)
@every("rows", [3, 20])
def test_each_weight_meets_its_own_input(quant_type: str, rows: int) -> None:
    """Rows of the identity matrix, so that each result is one weight; by GEMV and by GEMM."""
    weight = _blocks(10, 5, 256 // LAYOUTS[quant_type].weights, quant_type)
    inputs = torch.randperm(256, generator=torch.Generator().manual_seed(rows))[:rows]
    x = torch.eye(256)[inputs].to(DEVICE)
    want = oracles.dequantize_rows(weight, quant_type)[:, inputs].T
    torch.testing.assert_close(OPS.linear_gguf(x, weight, quant_type).cpu().double(), want, rtol=1e-6, atol=0)


@every("quant_type", ["Q8_0", "Q4_K"])
def test_a_row_among_eight_does_not_depend_on_the_others(quant_type: str) -> None:
    x, weight = _random(11, 8, 512).bfloat16(), _blocks(12, 9, 512 // LAYOUTS[quant_type].weights, quant_type)
    weight[:, 1::2] &= 0x3F  # no sum is infinite
    for rows in (8, 5, 3):
        together = OPS.linear_gguf(x[:rows], weight, quant_type)
        for row in range(rows):
            assert torch.equal(OPS.linear_gguf(x[row : row + 1], weight, quant_type)[0], together[row])


def test_blocks_may_begin_at_odd_addresses() -> None:
    rows = _blocks(13, 4, 2, "Q6_K")
    wider = torch.full((4, rows.shape[1] + 5), 255, dtype=torch.uint8, device=DEVICE)
    wider[:, 3:-2] = rows
    index, x = torch.tensor([2, 0, 3], device=DEVICE), _random(14, 2, 512)
    assert torch.equal(
        OPS.rows_gguf(wider[:, 3:-2], "Q6_K", index, torch.bfloat16), OPS.rows_gguf(rows, "Q6_K", index, torch.bfloat16)
    )
    assert torch.equal(OPS.linear_gguf(x, wider[:, 3:-2], "Q6_K"), OPS.linear_gguf(x, rows, "Q6_K"))


def test_what_does_not_fit_is_refused() -> None:
    rows = torch.zeros(2, 36, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"no kernel for IQ2_XS; there are kernels for Q4_0, .*Q6_K"):
        OPS.linear_gguf(torch.zeros(1, 64, device=DEVICE), rows, "IQ2_XS")
    with pytest.raises(ValueError, match="rows of 36 bytes are not whole blocks of Q8_0, 34 bytes"):
        OPS.rows_gguf(rows, "Q8_0", torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.float32)
    with pytest.raises(ValueError, match="x has 32 columns, but the weight has 64 inputs"):
        OPS.linear_gguf(torch.zeros(1, 32, device=DEVICE), rows, "Q4_0")


@every("device", [DEVICE or ON_META, ON_META])
def test_shapes_without_rows_and_on_the_meta_device(device: torch.device) -> None:
    x = torch.zeros(0, 64, dtype=torch.float16, device=device)
    weight, scale = torch.zeros(5, 64, dtype=torch.int8, device=device), torch.ones(5, device=device)
    one, added = torch.ones(1, device=device), torch.zeros(5, dtype=torch.int32, device=device)
    rows, index = torch.zeros(5, 36, dtype=torch.uint8, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    results = (
        OPS.linear_w8a8(x, weight, scale, None),
        OPS.linear_w8a8_static(x, weight, one, one, added, scale),
        OPS.linear_int8(x, weight, scale, None),
        OPS.linear_gguf(x, rows, "Q4_0"),
        OPS.rows_gguf(rows, "Q4_0", index, torch.float16),
    )
    for result, columns in zip(results, (5, 5, 5, 5, 64), strict=True):
        assert result.shape == (0, columns)
        assert result.dtype == torch.float16
        assert result.device.type == device.type
