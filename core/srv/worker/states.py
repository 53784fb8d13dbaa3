"""The recurrent states of running requests, and the snapshots of cached prefixes, on the device.

    slot 0                   rows of padding
    slots 1 .. running       the request in slot s of the scheduler has slot s + 1
    slots after them         snapshots, which the scheduler gives to cached prefixes (`srv.memory.snapshots`)

Starts, steps and copies are enqueued in the order of plans, so that the device updates states in order, whatever is in
flight. Must not know what a state means.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from srv.models.layers.states import LayerStates, StatesOf
from srv.platform.interface import KVBuffers
from srv.platform.transfers import Transfers
from srv.sched.plan import Row, Start


class RecurrentStates:
    """The states of all recurrent cache groups; `rows`: the most rows of a captured step, 0 if none is captured."""

    def __init__(self, pools: Sequence[KVBuffers], transfers: Transfers, rows: int = 0) -> None:
        self._pools = tuple(pools)
        self._all = [tensor for pool in pools for tensor in pool.all()]
        self._layers = [
            [
                {name: pool.tensors[name][index] for name in pool.layout.names()}
                for index in range(len(pool.layout.group.layers))
            ]
            for pool in pools
        ]
        self._transfers = transfers
        self._static = torch.zeros(rows, dtype=torch.int64, device=transfers.device)  # slots of a captured step
        self._filled: tuple[int, tuple[int, ...]] = (0, ())  # what `fill` wrote last: the count, and the rows' slots
        self._last: tuple[tuple[int, ...], Tensor] = ((), self._static[:0])

    @property
    def static_bytes(self) -> int:
        """Bytes of what captured steps read beside the states."""
        return self._static.nbytes

    def start(self, start: Start) -> None:
        """The states of a request that starts: those that it goes on from, or zeros."""
        slot = start.slot + 1
        for tensor in self._all:
            if start.restored:
                tensor[slot].copy_(tensor[start.restored])
            else:
                tensor[slot].zero_()

    def save(self, rows: Sequence[Row]) -> None:
        """Copy the states of rows that have been computed to the slots that they name."""
        for row in rows:
            if row.saved:
                for tensor in self._all:
                    tensor[row.saved].copy_(tensor[row.slot + 1])

    def of_rows(self, rows: Sequence[Row], lens: Sequence[int]) -> StatesOf:
        """What the layers of an eager step ask for; `lens`: the tokens of each row."""
        return self._of(self._slots(tuple([row.slot + 1 for row in rows])), lens)

    def of_captured(self, count: int) -> StatesOf:
        """What the layers of a captured step of `count` rows ask for; `fill` says whose states these are."""
        return self._of(self._static[:count], (1,) * count)

    def fill(self, count: int, rows: Sequence[Row]) -> None:
        """The rows of the next replay of a step that was captured with `count` rows; the others are padding."""
        slots = tuple([row.slot + 1 for row in rows])
        if self._filled == (count, slots):  # as in most decode steps
            return
        self._filled = count, slots
        self._static[: len(slots)].copy_(self._slots(slots))
        self._static[len(slots) : count].zero_()

    def _of(self, slots: Tensor, lens: Sequence[int]) -> StatesOf:
        return lambda group, index: LayerStates(self._layers[group][index], slots, lens)

    def _slots(self, slots: tuple[int, ...]) -> Tensor:
        """int64 on the device; the tensor of the last call if the slots are the same, as in most decode steps."""
        if self._last[0] != slots:
            self._last = slots, self._transfers.upload_integers(slots)
        return self._last[1]
