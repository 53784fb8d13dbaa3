"""Random weights, for profiling and tests without a checkpoint.

Owns nothing but the distribution: small normal numbers, norms around one, the same for the same seed, names
and shapes whatever the device and dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from srv.models.base import Progress
from srv.models.loaders.filling import Meter

SPREAD = 0.02
STEPS = 73.3  # root mean square of whole numbers from -127 to 127
INPUT_STEP = 1 / 32  # activations after a norm reach about 4
CHUNK = 1 << 22  # numbers drawn at a time, so that no float32 copy of a large matrix is ever held


def load_dummy(targets: Mapping[str, Tensor], seed: int, progress: Progress | None = None) -> None:
    """Fill every target, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    meter = Meter(sum(target.nbytes for target in targets.values()), progress)
    for name in sorted(targets):
        target = targets[name]
        if not target.is_floating_point() or name.endswith(("_scale", "_offset")):
            _fill_quantized(name, target, generator)
            meter.add(target.nbytes, name)
            continue
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        rows = target.reshape(target.shape[0], -1) if target.dim() > 1 else target.unsqueeze(0)
        step = max(1, CHUNK // max(1, rows.shape[1]))
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step]
            part.copy_(torch.empty(part.shape).normal_(centre, SPREAD, generator=generator))
        meter.add(target.nbytes, name)


def _fill_quantized(name: str, target: Tensor, generator: torch.Generator) -> None:
    """Integers over all of int8, and scales with which they, too, have the spread of small numbers."""
    if target.dtype is torch.int8:
        target.copy_(torch.randint(-127, 128, target.shape, generator=generator, dtype=torch.int8))
    elif name.endswith("input_scale"):
        target.fill_(INPUT_STEP)
    elif name.endswith("_scale"):
        target.fill_(SPREAD / STEPS * (INPUT_STEP if name.endswith("deq_scale") else 1.0))
    else:
        target.zero_()
