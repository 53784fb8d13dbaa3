"""The parts of models with several residual streams, or hyper-connections (HY-V4). Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from srv.models.blueprint import Part, Weight

_FLOAT32 = 4  # bytes
_FLOAT32_COPIES = 3  # copies of the streams in float32 that exist at the same time


@dataclass(frozen=True)
class StreamStart(Part):
    """Each of `number` streams begins with the embedding."""

    number: int


@dataclass(frozen=True)
class StreamMixing(Part):
    """Weights that follow from the streams, one for each stream in each of `groups`: the first group is of what a part
    of a layer reads, and the second, if there is one, of its result in each stream.

    `magnitude`: the largest weight with which a result joins a stream. `eps`: is added to all weights. `norm_eps`: of
    the norm of the streams from which weights follow. `prefix`: of the names of its tensors.
    """

    number: int
    hidden: int
    groups: int
    magnitude: float
    eps: float
    norm_eps: float
    prefix: str = ""

    def weights(self) -> Iterator[Weight]:
        count = self.groups * self.number
        yield Weight(f"{self.prefix}fn", (count, self.number * self.hidden))
        yield Weight(f"{self.prefix}base", (count,))
        yield Weight(f"{self.prefix}scale", (self.groups,))

    def step_bytes(self, item: int) -> int:
        """Bytes of temporary tensors per token; `item`: bytes per element of the model's dtype."""
        return self.number * self.hidden * (2 * item + _FLOAT32_COPIES * _FLOAT32)
