"""Collective operations through a vendor's library, NCCL (RCCL on AMD GPUs) or XCCL, by torch.distributed.

It creates one process group object and its store, a file in the group's private directory; torch's global default group
is not used. Operations run in the current stream's order, and a captured step records them. All members get the same
bits from a sum: the libraries reduce each part of a tensor once and distribute the result.

Two ranks have run on simulated GPUs only, where the simulator's own group takes the place of the libraries. Not yet run
on real ones: neither library waits on the host, so a rank that is lost shows as the end of this process, by the
library's watchdog, after `RankGroup.timeout_s`; the engine reports that as a lost rank, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from srv.dist.group import RankGroup
from srv.errors import RankLost


@dataclass(frozen=True, slots=True)
class Membership:
    """What a process group is made from. `timeout`: of its operations.

    lost(reason): the error for an operation that fails where no caller waits for it, as in a replayed step. Of the
    groups only the simulated one needs it.
    """

    store: Any
    rank: int
    size: int
    timeout: timedelta
    device: torch.device
    lost: Callable[[str], Exception]


MakeGroup = Callable[[Membership], Any]


def join(backend: str, group: RankGroup, device: torch.device, simulated: MakeGroup | None = None) -> TorchCommunicator:
    """Join a group through "nccl" or "xccl", or on a simulated device through what is given for it."""
    return TorchCommunicator(group, device, simulated or {"nccl": _nccl, "xccl": _xccl}[backend])


def _nccl(member: Membership) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = member.timeout
    group = dist.ProcessGroupNCCL(member.store, member.rank, member.size, options)
    # As `init_process_group(device_id=...)` does: the first operation, which may be one that is captured, then finds
    # the ranks connected, and the library knows the device even where rank and index differ.
    group.eager_connect_single_device(member.device)
    return group


def _xccl(member: Membership) -> Any:
    xccl: Any = dist.ProcessGroupXCCL  # type: ignore[attr-defined]
    options = xccl.Options()
    options._timeout = member.timeout
    return xccl(member.store, member.rank, member.size, options)


class TorchCommunicator:
    """Implements `srv.platform.interface.Communicator`. The constructor waits for all members of the group."""

    def __init__(self, group: RankGroup, device: torch.device, make_group: MakeGroup) -> None:
        self._group, self._device = group, device
        start = timedelta(seconds=group.start_timeout_s)
        store = dist.FileStore(str(Path(group.directory, f"{group.name}.store")), group.size)
        store.set_timeout(start)
        timeout = timedelta(seconds=group.timeout_s)
        try:
            self._process_group = make_group(Membership(store, group.rank, group.size, timeout, device, self._lost))
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
        self._run(lambda: self._process_group.allgather([list(gathered.unbind())], [tensor]))
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
