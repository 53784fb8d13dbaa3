"""Layers that the ranks of several replicas divide, each replica with tokens of its own (data-parallel attention).

    replica 0   x [T0, H] ── padded ─┐                        ┌─ its rows ── [T0, H]
                                     ├─ [replicas · T, H] ─ layer ─ sum ─┤
    replica 1   x [T1, H] ── padded ─┘                        └─ its rows ── [T1, H]

Attention is computed by the ranks of one replica alone; what follows it is divided among all. T is the most tokens that
any replica has, on which they have agreed before the step (`srv.dist.agreement`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from srv.models.modules.place import Place
from srv.platform.interface import Communicator


class ReplicaRows:
    """The rows of all replicas, as one of them sees them. `communicator`: of the ranks with the same heads."""

    def __init__(self, communicator: Communicator, replica: int) -> None:
        self._communicator, self._replica = communicator, replica

    @classmethod
    def of(cls, place: Place) -> ReplicaRows | None:
        """None if there is one replica."""
        context = place.over("replicas").context
        return None if context.communicator is None else cls(context.communicator, context.group.rank)

    def run(self, compute: Callable[[Tensor], Tensor], x: Tensor, rows: int | None) -> Tensor:
        """Compute x [T, H] together with the rows of the others; [T, ...]: this replica's results.

        `rows`: to which all are padded; None: all have as many.
        """
        own = len(x)
        rows = own if rows is None else rows
        padded = x if own == rows else F.pad(x, (0, 0, 0, rows - own))
        results = compute(self._communicator.all_gather(padded).flatten(0, 1))
        begin = self._replica * rows
        return results[begin : begin + own]
