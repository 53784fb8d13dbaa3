"""Rotary position embeddings, on host views. Computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from srv_npu_simulator.operators.checks import FLOATS, Rules

MAX_ROTARY_DIM = 896
MAX_ROTARY_HEADS = 1000


def rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """self * r1 + rotated(self) * r2, with r1 = cos and r2 = sin broadcast over dimensions of size 1."""
    rules = Rules("npu_rotary_mul")
    rules.absent(rotate=rotate)
    rules.require(
        rotary_mode in ("half", "interleave"), "rotary_mode", repr(rotary_mode), "must be 'half' or 'interleave'"
    )
    rules.dtype("self", self, FLOATS)
    rules.dims("self", self, 3, 4)
    size, described = self.shape[-1], f"of shape {tuple(self.shape)}"
    rules.require(
        size % 2 == 0 and size < MAX_ROTARY_DIM, "self", described, f"its head dim must be even and < {MAX_ROTARY_DIM}"
    )
    for name, value in (("r1", r1), ("r2", r2)):
        rules.same_dtype(name, value, "self", self.dtype)
        rules.dims(name, value, self.dim())
        rules.require(
            value.shape[-1] == size, name, f"of shape {tuple(value.shape)}", f"must have the head dim of self, {size}"
        )
    rules.shape("r2", r2, r1.shape, "the shape of r1")
    layouts = _fitting(self, r1, rotary_mode)
    described = f"of shape {tuple(r1.shape)} for self {tuple(self.shape)}"
    rule = "must be 1 in the dimension of the heads, in that of the batch too or not (half mode: or all of self's)"
    rules.require(bool(layouts), "r1", described, rule)
    small = any(_within(self, layout, rotary_mode) for layout in layouts)
    rules.require(small, "self", f"of shape {tuple(self.shape)}", f"batch and heads must be below {MAX_ROTARY_HEADS}")
    return _rotated(self, r1, r2, rotary_mode)


def _fitting(x: Tensor, r1: Tensor, mode: str) -> list[str]:
    """The layouts of x for which r1 has an allowed shape."""
    shape, sizes = x.shape, tuple(r1.shape)
    fitting = []
    for layout in ("BNSD", "BSND", "SBND") if x.dim() == 4 else ("TND",):
        heads = [1 if axis == "N" else extent for axis, extent in zip(layout, shape, strict=True)]
        alone = [1 if axis in "NB" else extent for axis, extent in zip(layout, shape, strict=True)]
        allowed = [tuple(alone)] if mode == "interleave" else [tuple(alone), tuple(heads), tuple(shape)]
        if sizes in allowed:
            fitting.append(layout)
    return fitting


def _within(x: Tensor, layout: str, mode: str) -> bool:
    sizes = dict(zip(layout, x.shape, strict=True))
    batch, heads = sizes.get("B", 1), sizes["N"]
    return batch * heads < MAX_ROTARY_HEADS if mode == "interleave" else max(batch, heads) < MAX_ROTARY_HEADS


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    wide = x.float()
    if mode == "half":
        first, second = wide.chunk(2, -1)
        rotated_half = torch.cat((-second, first), -1)
    else:
        rotated_half = torch.stack((-wide[..., 1::2], wide[..., 0::2]), -1).flatten(-2)
    return (wide * cos.float() + rotated_half * sin.float()).to(x.dtype)
