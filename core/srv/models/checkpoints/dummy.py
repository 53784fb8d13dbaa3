"""Random weights, for profiling and for tests without a checkpoint.

Owns the distribution: small normal values, norms around one, and the same values for the same seed, names and shapes
whatever the device and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from srv.models.checkpoints.filling import NO_SLICES, Meter, Progress
from srv.models.checkpoints.matching import cut
from srv.models.checkpoints.slices import Slice, Slices, stored_shape

STD = 0.02  # of the weights
INT8_RMS = 73.3  # root mean square of uniform integers from -127 to 127
FP8_MAX = 448.0  # of float8_e4m3fn
INPUT_SCALE = 1 / 32  # activations after a norm reach about 4
CHUNK = 1 << 22  # elements generated at a time, so that no float32 copy of a large matrix is ever allocated


def load_dummy(
    weight_views: Mapping[str, Tensor], seed: int, progress: Progress | None = None, slices: Slices = NO_SLICES
) -> None:
    """Fill every tensor, in the order of their names.

    Sliced tensors get the same values as the slice of a whole one: the values outside are drawn and dropped.
    """
    generator = torch.Generator().manual_seed(seed)
    meter = Meter(sum(view.nbytes for view in weight_views.values()), progress)
    for name in sorted(weight_views):
        view = weight_views[name]
        if view.itemsize == 1 or not view.is_floating_point() or name.endswith(("_scale", "_offset")):
            _fill_quantized(name, view, generator)
            meter.add(view.nbytes, name)
            continue
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        _fill_normal(view if view.dim() else view.unsqueeze(0), slices.get(name), mean, generator)
        meter.add(view.nbytes, name)


def _fill_normal(view: Tensor, part: Slice | None, mean: float, generator: torch.Generator) -> None:
    """Fill a tensor of one or two axes with the values of its slice, a few stored rows at a time."""
    whole = stored_shape(view.shape, part)
    if len(whole) == 1:  # one row
        whole, view = (1, *whole), view.unsqueeze(0)
        part = None if part is None else part._replace(axis=1)
    rows, columns = (part, None) if part is not None and part.axis == 0 else (None, part)
    ranges = ((0, view.shape[0]),) if rows is None else rows.ranges
    parts = list(zip(ranges, torch.split(view, [end - begin for begin, end in ranges]), strict=True))
    step = max(1, CHUNK // max(1, math.prod(whole[1:])))
    for start in range(0, whole[0], step):
        values = torch.empty(min(step, whole[0] - start), *whole[1:]).normal_(mean, STD, generator=generator)
        for (begin, end), held in parts:
            first, last = max(start, begin), min(start + len(values), end)
            if first < last:
                held[first - begin : last - begin].copy_(cut(values[first - start : last - start], columns))


def _fill_quantized(name: str, view: Tensor, generator: torch.Generator) -> None:
    """Uniform int8 values, or normal FP8 values with the same root mean square, and scales that give the dequantized
    weights the standard deviation STD.
    """
    if view.dtype is torch.int8:
        view.copy_(torch.randint(-127, 128, view.shape, generator=generator, dtype=torch.int8))
    elif view.dtype is torch.float8_e4m3fn:
        view.copy_(torch.empty(view.shape).normal_(0, INT8_RMS, generator=generator).clamp_(-FP8_MAX, FP8_MAX))
    elif name.endswith("input_scale"):
        view.fill_(INPUT_SCALE)
    elif name.endswith("_scale"):
        view.fill_(STD / INT8_RMS * (INPUT_SCALE if name.endswith("deq_scale") else 1.0))
    else:
        view.zero_()
