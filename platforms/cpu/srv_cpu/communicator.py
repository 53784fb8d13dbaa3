"""Collective operations between ranks on one host: through shared memory, or over gloo.

Owns one process group object of gloo and its store, a file in the group's private directory; torch's global default
group is not used. gloo connects over the loopback interface, on ports that the operating system chooses.

Ranks meet over gloo and then exchange data through memory that all of them have mapped (`shared_memory`). Without the
native library, on an operating system without `memfd_create`, and for sums of other dtypes, it goes over gloo too. The
ring algorithm of gloo reduces each chunk on one rank and copies the result, so that all ranks get the same bits.

The operations are registered with torch's dispatcher, so that a captured step (`srv_kernels.cpu.captured_graph`) sees
and repeats them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, ProcessGroupGloo

from srv.dist.group import RankGroup
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
        self._library = torch.library.Library(_LIBRARY.format(group.name, group.rank), "DEF")
        self._all_reduce = self._define("all_reduce(Tensor(a!) tensor) -> ()", self._reduce_now)
        self._all_gather = self._define("all_gather(Tensor tensor) -> Tensor", self._gather_now)

    def _define(self, schema: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
        name = self._library.define(schema)
        self._library.impl(name, implementation, "CPU")
        operator: Callable[..., Any] = getattr(getattr(torch.ops, self._library.ns), name).default
        return operator

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_contiguous():
            raise ValueError(f"all_reduce needs a contiguous tensor, not one with strides {tensor.stride()}")
        self._all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = self._all_gather(tensor)
        return gathered

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

    def _reduce_now(self, tensor: torch.Tensor) -> None:
        shared = self._shared
        if shared is not None and tensor.dtype in SUMMED_DTYPES:
            shared.all_reduce(tensor)
        else:
            self._wait(self._process_group.allreduce([tensor]))

    def _gather_now(self, tensor: torch.Tensor) -> torch.Tensor:
        shared, tensor = self._shared, tensor.contiguous()
        gathered = tensor.new_empty((self._group.size, *tensor.shape))
        if shared is not None:
            shared.all_gather(tensor, gathered)
        else:
            self._wait(self._process_group.allgather([list(gathered.unbind())], [tensor]))
        return gathered

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise lost(self._group, str(error).partition(". This is")[0]) from error
