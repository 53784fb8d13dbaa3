"""Collective operations between ranks on one host, over gloo.

Owns one process group object of gloo and its store, a file in the group's private directory; torch's global default
group is not used. gloo connects over the loopback interface, on ports that the operating system chooses. Its ring
algorithm reduces each chunk on one rank and copies the result, so that all ranks get the same bits.

The operations are registered with torch's dispatcher, so that a captured step (`srv_kernels.cpu.captured_graph`) sees
and repeats them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, ProcessGroupGloo

from srv.dist.group import RankGroup
from srv.errors import RankLost

_LOOPBACK = "127.0.0.1"
_LIBRARY = "srv_cpu_{}"  # of torch operators; the group's name is inserted


class GlooCommunicator:
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
        self._library = torch.library.Library(_LIBRARY.format(group.name), "DEF")
        self._all_reduce = self._define("all_reduce(Tensor(a!) tensor) -> ()", self._reduce_now)
        self._all_gather = self._define("all_gather(Tensor tensor) -> Tensor", self._gather_now)

    def _define(self, schema: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
        name = self._library.define(schema)
        self._library.impl(name, implementation, "CPU")
        operator: Callable[..., Any] = getattr(getattr(torch.ops, self._library.ns), name).default
        return operator

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = self._all_gather(tensor)
        return gathered

    def barrier(self) -> None:
        options = torch.distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=self._group.start_timeout_s)
        self._wait(self._process_group.allreduce([torch.zeros(1)], options))

    def abort(self) -> None:
        self._process_group.abort()

    def _reduce_now(self, tensor: torch.Tensor) -> None:
        self._wait(self._process_group.allreduce([tensor]))

    def _gather_now(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty((self._group.size, *tensor.shape))
        self._wait(self._process_group.allgather([list(gathered.unbind())], [tensor]))
        return gathered

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            cause = str(error).partition(". This is")[0]
            raise RankLost(
                f"rank {self._group.rank} of group {self._group.name} cannot reach the others: {cause}"
            ) from error
