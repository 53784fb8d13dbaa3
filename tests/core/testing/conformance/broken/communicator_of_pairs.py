"""all_reduce adds the tensor of the next rank only, which is the sum where there are two ranks.

Caught by platform.communicator at L1, naming "all_reduce of float32".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpu_variant import manifest, with_communicator

if TYPE_CHECKING:
    from torch import Tensor

    from srv.dist.group import RankGroup
    from srv_cpu.communicator import CpuCommunicator


def of_pairs(base: type[CpuCommunicator]) -> type[CpuCommunicator]:
    class OfPairs(base):  # type: ignore[valid-type, misc]
        def __init__(self, group: RankGroup) -> None:
            super().__init__(group)
            self._both = (group.rank, (group.rank + 1) % group.size)

        def all_reduce(self, tensor: Tensor) -> Tensor:
            first, second = self._both
            gathered = self.all_gather(tensor)
            return tensor.copy_(gathered[first] + gathered[second])  # the fault

    return OfPairs


MANIFEST = manifest("communicator_of_pairs", with_communicator(of_pairs))
