"""all_gather returns the tensors of all members, the last rank's first.

Caught by platform.communicator at L1, naming "in the order of their ranks".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpu_variant import manifest, with_communicator

if TYPE_CHECKING:
    from torch import Tensor

    from srv_cpu.communicator import CpuCommunicator


def backwards(base: type[CpuCommunicator]) -> type[CpuCommunicator]:
    class Backwards(base):  # type: ignore[valid-type, misc]
        def all_gather(self, tensor: Tensor) -> Tensor:
            gathered: Tensor = super().all_gather(tensor)
            return gathered.flip(0)  # the fault

    return Backwards


MANIFEST = manifest("communicator_gathers_backwards", with_communicator(backwards))
