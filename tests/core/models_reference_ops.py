"""The ops that native layers need, in a few lines of torch: the meaning that every platform must match."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.platform.interface import OpImpl
from srv.platform.ops import Ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)

    return turn(q), turn(k)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def reference_impls() -> list[OpImpl]:
    ops = (rms_norm, add_rms_norm, rotary, silu_and_mul)
    return [OpImpl(op.__name__, "torch", lambda args: None, op) for op in ops]


def reference_ops() -> Ops:
    return Ops("reference", reference_impls())
