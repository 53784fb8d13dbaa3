"""Random weights, for profiling and for tests without a checkpoint.

Owns the distribution: small normal values, norms around one, and the same values for the same seed, names and shapes
whatever the device and dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from srv.models.formats.filling import Meter, Progress

STD = 0.02  # of the weights
INT8_RMS = 73.3  # root mean square of uniform integers from -127 to 127
INPUT_SCALE = 1 / 32  # activations after a norm reach about 4
CHUNK = 1 << 22  # elements generated at a time, so that no float32 copy of a large matrix is ever allocated


def load_dummy(weight_views: Mapping[str, Tensor], seed: int, progress: Progress | None = None) -> None:
    """Fill every tensor, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    meter = Meter(sum(view.nbytes for view in weight_views.values()), progress)
    for name in sorted(weight_views):
        view = weight_views[name]
        if not view.is_floating_point() or name.endswith(("_scale", "_offset")):
            _fill_quantized(name, view, generator)
            meter.add(view.nbytes, name)
            continue
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        rows = view.reshape(view.shape[0], -1) if view.dim() > 1 else view.unsqueeze(0)
        step = max(1, CHUNK // max(1, rows.shape[1]))
        for start in range(0, rows.shape[0], step):
            chunk = rows[start : start + step]
            chunk.copy_(torch.empty(chunk.shape).normal_(mean, STD, generator=generator))
        meter.add(view.nbytes, name)


def _fill_quantized(name: str, view: Tensor, generator: torch.Generator) -> None:
    """Uniform int8 values, and scales that give the dequantized weights the standard deviation STD."""
    if view.dtype is torch.int8:
        view.copy_(torch.randint(-127, 128, view.shape, generator=generator, dtype=torch.int8))
    elif name.endswith("input_scale"):
        view.fill_(INPUT_SCALE)
    elif name.endswith("_scale"):
        view.fill_(STD / INT8_RMS * (INPUT_SCALE if name.endswith("deq_scale") else 1.0))
    else:
        view.zero_()
