"""Triton's product with float32 sums: its contract, views of wider matrices, and what it refuses.

In Triton's interpreter, or on a GPU if TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import pytest
import torch
from every import every
from kernel_device import kernel_device

from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.tolerances import DTYPES

pytest.importorskip("triton", reason="Triton is not installed: pip install srv-kernels[triton]")
from srv_kernels.triton import dense_linear, gguf_linear  # noqa: F401  registers the operators

DEVICE = kernel_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU here: set TRITON_INTERPRET=1 to interpret the kernels")

OPS = torch.ops.srv_triton


@pytest.mark.slow
@every("dtype", DTYPES)
@every("op", ["linear_float32", "linear_gguf_float32"])
def test_logits_keep_their_contract(op: str, dtype: torch.dtype) -> None:
    assert violations(CONTRACTS[op], getattr(OPS, op), dtype, DEVICE) == []


@every("rows", [1, 16, 17, 70])
def test_sums_of_integers_are_exact_for_every_tile(rows: int) -> None:
    """Sizes that are multiples of no block; the weight is a part of a wider matrix, as that of one rank may be."""
    generator = torch.Generator().manual_seed(rows)
    x, wider = (torch.randint(-9, 10, (count, 301), generator=generator).bfloat16() for count in (rows, 67))
    weight = wider[:, 20:283]
    got = OPS.linear_float32(x[:, 20:283].to(DEVICE), weight.to(DEVICE))
    assert torch.equal(got.cpu(), x[:, 20:283].float() @ weight.float().T)


@every("device", [DEVICE or torch.device("meta"), torch.device("meta")])
def test_shapes_without_rows_and_on_the_meta_device(device: torch.device) -> None:
    x, weight = torch.zeros(0, 64, dtype=torch.float16, device=device), torch.zeros(5, 64, dtype=torch.float16)
    result = OPS.linear_float32(x, weight.to(device))
    assert (result.shape, result.dtype, result.device.type) == ((0, 5), torch.float32, device.type)


@every(
    ("weight", "said"),
    [
        (torch.zeros(2, 32), "but the weight is torch.float32 with 32 inputs"),
        (torch.zeros(2, 64).half(), "x is torch.float32 with 64 columns, but the weight is torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(weight: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dense_linear.multiply(torch.zeros(1, 64, device=DEVICE), weight.to(DEVICE))
