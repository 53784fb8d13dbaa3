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
CHUNK = 1 << 22  # numbers drawn at a time, so that no float32 copy of a large matrix is ever held


def load_dummy(targets: Mapping[str, Tensor], seed: int, progress: Progress | None = None) -> None:
    """Fill every target, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    meter = Meter(sum(target.nbytes for target in targets.values()), progress)
    for name in sorted(targets):
        target = targets[name]
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        rows = target.reshape(target.shape[0], -1) if target.dim() > 1 else target.unsqueeze(0)
        step = max(1, CHUNK // max(1, rows.shape[1]))
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step]
            part.copy_(torch.empty(part.shape).normal_(centre, SPREAD, generator=generator))
        meter.add(target.nbytes, name)
