"""Collective operations of torch.distributed's process groups, for platforms whose vendor has one (NCCL, HCCL, XCCL).

A platform passes what makes its group; this module owns the group object and its store, a file in the group's private
directory. torch's global default group is not used. Operations run in the order of the current stream, which waits for
them, and a captured step records them; the host waits only in `barrier`. The vendors' libraries reduce each part of a
tensor once and distribute the result, so that all members get the same bits from a sum.

None of these libraries raises an error for a member that is lost: their watchdog ends the process after
`RankGroup.timeout_s`, and captured operations have none. The engine notices by its own means (`srv.executor`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from srv.dist.group import RankGroup
from srv.errors import RankLost


@dataclass(frozen=True, slots=True)
class Membership:
    """What a process group is made from. `name`: of the group. `timeout`: of its operations.

    lost(reason): the error for an operation that fails where no caller waits for it, as in a replayed step. Of the
    groups only those of simulated devices need it.
    """

    name: str
    store: Any
    rank: int
    size: int
    timeout: timedelta
    device: torch.device
    lost: Callable[[str], Exception]


MakeGroup = Callable[[Membership], Any]


class ProcessGroupCommunicator:
    """Implements `srv.platform.interface.Communicator`. The constructor waits for all members of the group.

    make_group: returns a process group of torch.distributed, or an object with its methods `allreduce`,
    `_allgather_base` and `abort`.
    """

    def __init__(self, group: RankGroup, device: torch.device, make_group: MakeGroup) -> None:
        self._group, self._device = group, device
        start = timedelta(seconds=group.start_timeout_s)
        store = FileStore(str(Path(group.directory, f"{group.name}.store")), group.size)
        store.set_timeout(start)
        timeout = timedelta(seconds=group.timeout_s)
        member = Membership(group.name, store, group.rank, group.size, timeout, device, self._lost)
        try:
            self._process_group = make_group(member)
        except RuntimeError as error:
            raise self._lost(_first_line(error)) from error
        self.barrier()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `srv.platform.interface.Communicator`."""
        if not tensor.is_contiguous():
            raise ValueError(f"all_reduce needs a contiguous tensor, not one with strides {tensor.stride()}")
        self._run(lambda: self._process_group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `srv.platform.interface.Communicator`."""
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self._group.size, *tensor.shape))
        self._run(lambda: self._process_group._allgather_base(gathered.view(-1), tensor.view(-1)))
        return gathered

    def barrier(self) -> None:
        """See `srv.platform.interface.Communicator`: every member adds 1, and the host reads the sum."""
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=self._group.start_timeout_s)
        count = torch.ones(1, device=self._device)
        self._run(lambda: self._process_group.allreduce([count], options))
        if int(count.item()) != self._group.size:
            raise self._lost(f"{int(count.item())} of {self._group.size} ranks are there")

    def abort(self) -> None:
        """See `srv.platform.interface.Communicator`."""
        self._process_group.abort()

    def _run(self, operation: Callable[[], Any]) -> None:
        """Make the current stream wait for it; the host does not, except where the library computes on the host."""
        try:
            operation().wait()
        except RuntimeError as error:
            raise self._lost(_first_line(error)) from error

    def _lost(self, reason: str) -> RankLost:
        return RankLost(f"rank {self._group.rank} of group {self._group.name} cannot reach the others: {reason}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
