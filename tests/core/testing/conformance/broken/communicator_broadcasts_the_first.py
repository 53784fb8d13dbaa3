"""broadcast always distributes the tensor of rank 0.

Caught by platform.communicator at L1, naming "does not return the tensor of rank 1".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpu_variant import manifest, with_communicator

if TYPE_CHECKING:
    from torch import Tensor

    from srv_cpu.communicator import CpuCommunicator


def of_the_first(base: type[CpuCommunicator]) -> type[CpuCommunicator]:
    class OfTheFirst(base):  # type: ignore[valid-type, misc]
        def broadcast(self, tensor: Tensor, source: int) -> Tensor:
            broadcast: Tensor = super().broadcast(tensor, 0)  # the fault
            return broadcast

    return OfTheFirst


MANIFEST = manifest("communicator_broadcasts_the_first", with_communicator(of_the_first))
