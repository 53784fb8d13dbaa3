"""Collective operations of torch.distributed's process groups, for platforms whose vendor has one (NCCL, HCCL, XCCL).

A platform passes what makes its group; this module owns the group object and its store, a file in the group's private
directory. torch's global default group is not used. Operations run in the order of the current stream, which waits for
them, and a captured step records them; the host waits only in `barrier`. The vendors' libraries reduce each part of a
tensor once and distribute the result, so that all members get the same bits from a sum. Where values are only moved,
the libraries get their bytes, since none of them knows all dtypes; what has no elements is not given to them.

None of these libraries raises an error for a member that is lost: their watchdog ends the process after
`RankGroup.timeout_s`, and captured operations have none. The engine notices by its own means (`srv.executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from srv.dist.group import RankGroup
from srv.errors import RankLost
from srv.platform.operands import as_bytes, require_contiguous, require_member, require_splits, rows_per_member


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
    `_allgather_base`, `_reduce_scatter_base`, `alltoall_base`, `broadcast`, `send`, `recv` and `abort`. views: whether
    the library takes tensors that do not begin where their memory does.
    """

    def __init__(self, group: RankGroup, device: torch.device, make_group: MakeGroup, *, views: bool = True) -> None:
        self._group, self._device, self._views = group, device, views
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

    @property
    def process_group(self) -> Any:
        """What `make_group` returned, for libraries that take such an object."""
        return self._process_group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `srv.platform.interface.Communicator`."""
        return self._replace("all_reduce", tensor, lambda own: self._process_group.allreduce([own]))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See `srv.platform.interface.Communicator`."""
        gathered = tensor.new_empty((self._group.size, *tensor.shape))
        if tensor.numel():
            own = as_bytes(self._operand(tensor))
            self._run(lambda: self._process_group._allgather_base(as_bytes(gathered), own))
        return gathered

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """See `srv.platform.interface.Communicator`."""
        rows = rows_per_member("reduce_scatter", tensor, self._group.size)
        part = tensor.new_empty((rows, *tensor.shape[1:]))
        if tensor.numel():
            own = self._operand(tensor).view(-1)
            self._run(lambda: self._process_group._reduce_scatter_base(part.view(-1), own))
        return part

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """See `srv.platform.interface.Communicator`."""
        rows_per_member("all_to_all", tensor, self._group.size)
        received = tensor.new_empty(tensor.shape)
        if tensor.numel():
            own = as_bytes(self._operand(tensor))
            self._run(lambda: self._process_group.alltoall_base(as_bytes(received), own, [], []))
        return received

    def all_to_all_uneven(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `srv.platform.interface.Communicator`. A member without rows takes part: the others do not know of it."""
        require_splits(tensor, send, receive, self._group.size)
        received = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        width = tensor.shape[1:].numel() * tensor.itemsize
        if width:
            into, own = (as_bytes(each).view(-1, width) for each in (received, self._operand(tensor)))
            self._run(lambda: self._process_group.alltoall_base(into, own, list(receive), list(send)))
        return received

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """See `srv.platform.interface.Communicator`."""
        require_member("broadcast", source, self._group.size)
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._replace("broadcast", tensor, lambda own: self._process_group.broadcast([as_bytes(own)], options))

    def send(self, tensor: Tensor, target: int) -> None:
        """See `srv.platform.interface.Communicator`."""
        require_member("send", target, self._group.size, self._group.rank)
        if tensor.numel():
            own = as_bytes(self._operand(tensor))
            self._run(lambda: self._process_group.send([own], target, 0))

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """See `srv.platform.interface.Communicator`."""
        require_member("recv", source, self._group.size, self._group.rank)
        return self._replace("recv", tensor, lambda own: self._process_group.recv([as_bytes(own)], source, 0))

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

    def _replace(self, name: str, tensor: Tensor, operation: Callable[[Tensor], Any]) -> Tensor:
        """Perform an operation that replaces the values of `tensor`, and return it."""
        require_contiguous(name, tensor)
        if tensor.numel():
            own = self._operand(tensor)
            self._run(lambda: operation(own))
            if own is not tensor:
                tensor.copy_(own)
        return tensor

    def _operand(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy that the library takes."""
        tensor = tensor.contiguous()
        return tensor if self._views or not tensor.storage_offset() else tensor.clone()

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
