"""Collective operations between processes that simulate one GPU each, in place of NCCL and XCCL.

An operation is one kernel of the device (`launch`): it runs in order with its stream, or is recorded by a capture, and
meets the other processes when it runs. They exchange the host memory behind the tensors over gloo. Its ring algorithm
reduces each part of a tensor on one rank and copies the result, so that all ranks get the same bits, as from NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from srv_gpu_simulator.device.accelerator import Accelerator

_LOOPBACK = "127.0.0.1"


class Work:
    """An operation that is enqueued. The stream's order is all that its caller has to wait for."""

    def wait(self) -> bool:
        return True


class RankedGroup:
    """The part of `ProcessGroupNCCL` and `ProcessGroupXCCL` that srv calls. The constructor waits for all members.

    store: of torch.distributed. timeout: of operations without one of their own. lost(reason): makes the error of an
    operation that a member does not join. The libraries have none: their watchdog ends the process.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        lost: Callable[[str], Exception],
    ) -> None:
        self._accelerator, self._timeout, self._lost = accelerator, timeout, lost
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timeout
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        """Replace the tensor by the sum over all ranks."""
        if options is None:
            options = dist.AllreduceOptions()
            options.timeout = self._timeout
        self._accelerator.launch("all_reduce", lambda own: self._meet(self._gloo.allreduce, own, options), tensors)
        return Work()

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Work:
        """Fill outputs[0] with the tensors inputs[0] of all ranks."""
        self._accelerator.launch("all_gather", lambda *both: self._meet(self._gloo.allgather, *both), outputs, inputs)
        return Work()

    def abort(self) -> None:
        self._gloo.abort()

    def _meet(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Perform the operation with the host's views of the tensors."""
        try:
            operation(*arguments).wait()
        except RuntimeError as error:
            raise self._lost(str(error).partition(". This is")[0]) from error
