"""Weights in FRACTAL_NZ, the blocked format that the matrix unit reads in place.

A matrix in the plain format (ND) is rearranged at every product. The cast is made once, after loading, where the
format allows it: both axes of a 16-bit matrix are multiples of 16. A weight that is also the embedding stays as it
is, since rows are read from it.
"""

from __future__ import annotations

import torch
from torch import nn

from srv.models.layers import Linear
from srv_npu.sdk import Sdk

FRACTAL_NZ = 29  # the format's number in ACL
_MULTIPLE = 16
_DTYPES = (torch.float16, torch.bfloat16)


def cast_weights(sdk: Sdk, model: nn.Module) -> tuple[int, int]:
    """Cast what allows it, in place of the plain weight; how many matrices that were, and of how many."""
    matrices = [module for module in model.modules() if isinstance(module, Linear)]
    allowed = [linear for linear in matrices if may_cast(linear)]
    with torch.no_grad():
        for linear in allowed:
            linear.weight.data = sdk.npu_format_cast(linear.weight.data, FRACTAL_NZ)
    return len(allowed), len(matrices)


def may_cast(linear: Linear) -> bool:
    """Whether FRACTAL_NZ can hold the weight, and nothing but products reads it."""
    aligned = all(size % _MULTIPLE == 0 for size in linear.weight.shape)
    return linear.weight.dtype in _DTYPES and aligned and not linear.shared
