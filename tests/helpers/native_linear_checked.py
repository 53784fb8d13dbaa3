"""Compare a linear layer with the product in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from srv_kernels.cases import GGUF_BLOCKS

BLOCK_WEIGHTS = {name: weights for name, (weights, *_) in GGUF_BLOCKS.items()}
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}  # relative to the result


def uses_int16_path(isa: str, stored: str) -> bool:
    """Whether gguf_linear.cpp multiplies this type as int16, with a row's inputs quantized to 16 bits."""
    return isa == "avx2" and (stored in ("Q5_0", "Q8_0", "Q6_K", "MXFP4") or stored.startswith("IQ"))


def assert_linear(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """got [T, outputs] is x [T, inputs] times weight [outputs, inputs], plus bias [outputs], except for rounding."""
    want, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        want, magnitude = want + bias.double(), magnitude + bias.double().abs()
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    # Sources of error: the order of the sums, one rounding of the result, and denormals that VDPBF16PS and BFDOT flush.
    allowed = 1e-6 * magnitude + ERROR[x.dtype] * want.abs() + x.shape[1] * 2.0**-126
    assert bool(((got.double() - want).abs() <= allowed).all())
