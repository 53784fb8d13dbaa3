"""A capture does not record all_to_all, so that a replay does not repeat it.

Caught by graph.communicator at L2, naming "a replayed step with all_reduce".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpu_variant import manifest, with_communicator

if TYPE_CHECKING:
    from torch import Tensor

    from srv_cpu.communicator import CpuCommunicator


def unrecorded(base: type[CpuCommunicator]) -> type[CpuCommunicator]:
    class Unrecorded(base):  # type: ignore[valid-type, misc]
        def all_to_all(self, tensor: Tensor) -> Tensor:
            size = self._group.size
            table = [len(tensor) // size] * size**2
            exchanged: Tensor = self._all_to_all_now(tensor, table)  # the fault: not the operator that a capture sees
            return exchanged

    return Unrecorded


MANIFEST = manifest("communicator_exchanges_once", with_communicator(unrecorded))
