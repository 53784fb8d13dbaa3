"""Collective operations through a vendor's library, NCCL (RCCL on AMD GPUs) or XCCL, by torch.distributed.

It creates one process group object and its store, a file in the group's private directory; torch's global default group
is not used. Operations run in the current stream's order, and a captured step records them. All members get the same
bits from a sum: the libraries reduce each part of a tensor once and distribute the result.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from srv.dist.group import RankGroup
from srv.errors import RankLost

MakeGroup = Callable[[Any, int, int, timedelta], Any]  # store, rank, size, timeout


def join(backend: str, group: RankGroup, device: torch.device) -> TorchCommunicator:
    """Join a group through "nccl" or "xccl"."""
    return TorchCommunicator(group, device, {"nccl": _nccl, "xccl": _xccl}[backend])


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _xccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    xccl: Any = dist.ProcessGroupXCCL  # type: ignore[attr-defined]
    options = xccl.Options()
    options._timeout = timeout
    return xccl(store, rank, size, options)


class TorchCommunicator:
    """Implements `srv.platform.interface.Communicator`. The constructor waits for all members of the group."""

    def __init__(self, group: RankGroup, device: torch.device, make_group: MakeGroup) -> None:
        self._group, self._device = group, device
        start = timedelta(seconds=group.start_timeout_s)
        store = dist.FileStore(str(Path(group.directory, f"{group.name}.store")), group.size)
        store.set_timeout(start)
        self._process_group = make_group(store, group.rank, group.size, timedelta(seconds=group.timeout_s))
        self.barrier()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `srv.platform.interface.Communicator`."""
        if not tensor.is_contiguous():
            raise ValueError(f"all_reduce needs a contiguous tensor, not one with strides {tensor.stride()}")
        self._wait(self._process_group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `srv.platform.interface.Communicator`."""
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self._group.size, *tensor.shape))
        self._wait(self._process_group.allgather([list(gathered.unbind())], [tensor]))
        return gathered

    def barrier(self) -> None:
        """See `srv.platform.interface.Communicator`: every member adds 1, and the host reads the sum."""
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=self._group.start_timeout_s)
        count = torch.ones(1, device=self._device)
        self._wait(self._process_group.allreduce([count], options))
        if int(count.item()) != self._group.size:
            raise self._lost(f"{int(count.item())} of {self._group.size} ranks are there")

    def abort(self) -> None:
        """See `srv.platform.interface.Communicator`."""
        self._process_group.abort()

    def _wait(self, work: Any) -> None:
        """Make the current stream wait; the host does not, except where the library computes on the host."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(str(error).partition("\n")[0]) from error

    def _lost(self, reason: str) -> RankLost:
        return RankLost(f"rank {self._group.rank} of group {self._group.name} cannot reach the others: {reason}")
