"""What replicas that compute each step together have agreed on before it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self


class StepShape(NamedTuple):
    """The shape of a step that several replicas compute together; each pads what it has to it.

    `tokens`, `outputs`: the most tokens, and the most positions whose logits are needed, of any replica. `decodes`:
    each row of every replica computes one token and samples, so that all may replay a captured step.
    """

    tokens: int = 1
    outputs: int = 1
    decodes: bool = True

    @classmethod
    def of_all(cls, shapes: Iterable[Self]) -> Self:
        tokens, outputs, decodes = zip(*shapes, strict=True)
        return cls(max(tokens), max(outputs), all(decodes))


IDLE = StepShape()  # of a replica without work, which computes a row that nobody reads
