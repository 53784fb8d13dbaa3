"""The sizes of hyper-connections, as data. Torch-free: `srv.models.layers.hyper_connections` computes."""

from __future__ import annotations

from typing import NamedTuple

_FLOAT32 = 4  # bytes
_WIDE = 3  # copies of the streams in float32 that exist at the same time


class StreamSizes(NamedTuple):
    """The residual streams of a model: their `number`. `magnitude`: the largest weight with which a result joins one.
    `eps`: is added to all weights. `norm_eps`: of the norm of the streams from which weights follow.
    """

    number: int
    magnitude: float
    eps: float
    norm_eps: float

    def step_bytes(self, hidden: int, item: int) -> int:
        """Bytes of temporary tensors per token; `item`: bytes per element of the model's dtype."""
        return self.number * hidden * (2 * item + _WIDE * _FLOAT32)
