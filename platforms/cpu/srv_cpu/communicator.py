"""Collective operations between ranks on one host: through shared memory, or over gloo.

Owns one process group object of gloo and its store, a file in the group's private directory; torch's global default
group is not used. gloo connects over the loopback interface, on ports that the operating system chooses.

Ranks meet over gloo and then exchange data through memory that all of them have mapped (`shared_memory`). Without the
native library, on an operating system without `memfd_create`, for sums of other dtypes, and between two ranks alone, it
goes over gloo too. The ring algorithm of gloo reduces each chunk on one rank and copies the result, so that all ranks
get the same bits. Where values are only moved, it gets their bytes, because it does not know all dtypes.

The operations are registered with torch's dispatcher, so that a captured step (`srv_kernels.cpu.captured_graph`) sees
and repeats them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, FileStore, ProcessGroupGloo

from srv.dist.group import RankGroup
from srv.platform.operands import as_bytes, require_contiguous, require_member, require_splits, rows_per_member
from srv_cpu.shared_memory import SUMMED_DTYPES, SharedMemory, lost

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_LIBRARY = "srv_cpu_{}_{}"  # of torch operators, by the name of the group and the rank


class CpuCommunicator:
    """Implements `srv.platform.interface.Communicator`. The constructor waits for all members of the group."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        start_timeout = timedelta(seconds=group.start_timeout_s)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = start_timeout
        store = FileStore(str(Path(group.directory, f"{group.name}.store")), group.size)
        store.set_timeout(start_timeout)
        self._process_group = ProcessGroupGloo(store, group.rank, group.size, options)
        self._process_group.set_timeout(timedelta(seconds=group.timeout_s))
        self._shared = SharedMemory.join(group, store, self._all_agree)
        if group.rank == 0:
            path = "gloo" if self._shared is None else "shared memory"
            logger.info("the %d ranks of group %s exchange data through %s", group.size, group.name, path)
        name = re.sub(r"\W", "_", group.name)
        self._library = torch.library.Library(_LIBRARY.format(name, group.rank), "DEF")
        self._all_reduce = self._define("all_reduce(Tensor(a!) tensor) -> ()", self._reduce_now)
        self._all_gather = self._define("all_gather(Tensor tensor) -> Tensor", self._gather_now)
        self._reduce_scatter = self._define("reduce_scatter(Tensor tensor) -> Tensor", self._reduce_scatter_now)
        self._all_to_all = self._define("all_to_all(Tensor tensor, int[] table) -> Tensor", self._all_to_all_now)
        self._broadcast = self._define("broadcast(Tensor(a!) tensor, int source) -> ()", self._broadcast_now)

    def _define(self, schema: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
        name = self._library.define(schema)
        self._library.impl(name, implementation, "CPU")
        operator: Callable[..., Any] = getattr(getattr(torch.ops, self._library.ns), name).default
        return operator

    def all_reduce(self, tensor: Tensor) -> Tensor:
        require_contiguous("all_reduce", tensor)
        self._all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered: Tensor = self._all_gather(tensor)
        return gathered

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        rows_per_member("reduce_scatter", tensor, self._group.size)
        part: Tensor = self._reduce_scatter(tensor)
        return part

    def all_to_all(self, tensor: Tensor) -> Tensor:
        size = self._group.size
        received: Tensor = self._all_to_all(tensor, [rows_per_member("all_to_all", tensor, size)] * size**2)
        return received

    def all_to_all_uneven(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Every member learns what all of them send: an operation through memory ends after the longest of them.

        ValueError, on all members, also if one does not send what another one expects: gloo would end the process.
        """
        require_splits(tensor, send, receive, self._group.size)
        table, expected = self._gather_now(torch.tensor([[*send], [*receive]])).unbind(1)
        if not torch.equal(table, expected.T):
            raise ValueError(
                f"the ranks of group {self._group.name} send {table.tolist()} rows to one another, but expect "
                f"{expected.T.tolist()}"
            )
        received: Tensor = self._all_to_all(tensor, table.flatten().tolist())
        return received

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        require_contiguous("broadcast", tensor)
        require_member("broadcast", source, self._group.size)
        self._broadcast(tensor, source)
        return tensor

    def send(self, tensor: Tensor, target: int) -> None:
        require_member("send", target, self._group.size, self._group.rank)
        if tensor.numel():
            self._wait(self._process_group.send([as_bytes(tensor.contiguous())], target, 0), self._group.timeout_s)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        require_contiguous("recv", tensor)
        require_member("recv", source, self._group.size, self._group.rank)
        if tensor.numel():
            self._wait(self._process_group.recv([as_bytes(tensor)], source, 0), self._group.timeout_s)
        return tensor

    def barrier(self) -> None:
        self._all_agree(True)

    def abort(self) -> None:
        if self._shared is not None:
            self._shared.abort()
            self._shared = None
        self._process_group.abort()
        self._library._destroy()  # a later group may have the same name

    def _all_agree(self, value: bool) -> bool:
        """Whether `value` is true on all members; for starting up."""
        options = torch.distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=self._group.start_timeout_s)
        count = torch.tensor([int(value)])
        self._wait(self._process_group.allreduce([count], options))
        return int(count) == self._group.size

    def _reduce_now(self, tensor: Tensor) -> None:
        shared = self._shared
        if shared is not None and tensor.dtype in SUMMED_DTYPES:
            shared.all_reduce(tensor)
        elif tensor.numel():
            self._wait(self._process_group.allreduce([tensor]))

    def _gather_now(self, tensor: Tensor) -> Tensor:
        shared, tensor = self._shared, tensor.contiguous()
        gathered = tensor.new_empty((self._group.size, *tensor.shape))
        if shared is not None:
            shared.all_gather(tensor, gathered)
        elif tensor.numel():
            self._wait(self._process_group._allgather_base(as_bytes(gathered), as_bytes(tensor)))
        return gathered

    def _reduce_scatter_now(self, tensor: Tensor) -> Tensor:
        shared, tensor = self._shared, tensor.contiguous()
        part = tensor.new_empty((len(tensor) // self._group.size, *tensor.shape[1:]))
        if shared is not None and tensor.dtype in SUMMED_DTYPES:
            shared.reduce_scatter(tensor, part)
        elif part.numel():
            self._wait(self._process_group._reduce_scatter_base(part.view(-1), tensor.view(-1)))
        return part

    def _all_to_all_now(self, tensor: Tensor, table: list[int]) -> Tensor:
        """table: how many rows each member sends to each, [members, members]."""
        shared, tensor, size = self._shared, tensor.contiguous(), self._group.size
        send = table[self._group.rank * size :][:size]
        receive = table[self._group.rank :: size]
        received = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        width = tensor.shape[1:].numel() * tensor.itemsize
        if shared is not None:
            shared.all_to_all(tensor, [rows * width for rows in table], received)
        elif width and any(table):
            rows = (as_bytes(each).view(-1, width) for each in (received, tensor))
            self._wait(self._process_group.alltoall_base(*rows, receive, send))
        return received

    def _broadcast_now(self, tensor: Tensor, source: int) -> None:
        if self._shared is not None:
            self._shared.broadcast(tensor, source)
        elif tensor.numel():
            options = BroadcastOptions()
            options.rootRank = source
            self._wait(self._process_group.broadcast([as_bytes(tensor)], options))

    def _wait(self, work: Any, timeout_s: float = 0.0) -> None:
        """timeout_s: of an operation between two ranks; others have that of the process group."""
        try:
            work.wait(timedelta(seconds=timeout_s))  # 0: no other timeout
        except RuntimeError as error:
            raise lost(self._group, str(error).partition(". This is")[0]) from error
