"""A capture does not record all_reduce, so that a replay does not repeat it.

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
        def all_reduce(self, tensor: Tensor) -> Tensor:
            self._reduce_now(tensor)  # the fault: not the operator that a capture sees
            return tensor

    return Unrecorded


MANIFEST = manifest("communicator_sums_once", with_communicator(unrecorded))
