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

    def connection_parameters(self, hidden: int) -> int:
        """Those of the mixing before and after one part of a layer."""
        return 2 * self.number * (self.number * hidden + 1) + 2

    def parameters(self, hidden: int, layers: int) -> int:
        """Those of a model: two connections per layer, and the mixing after the last one."""
        return 2 * layers * self.connection_parameters(hidden) + self.number * (self.number * hidden + 1) + 1

    def step_bytes(self, hidden: int, item: int) -> int:
        """Bytes of temporary tensors per token; `item`: bytes per element of the model's dtype."""
        return self.number * hidden * (2 * item + _WIDE * _FLOAT32)
