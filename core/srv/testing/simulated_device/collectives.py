"""Collective operations between processes that simulate one device each, in place of NCCL, HCCL and XCCL.

    caller's stream  ──work──┐                        ┌──later work──
                             └─wait─> group's stream ─┘ Work.wait()

An operation waits for the caller's stream, runs in the group's own stream, and meets the other processes when it runs;
`Work.wait` makes the caller's stream wait for it. A program that leaves out that call reads the old values in the
asynchronous mode, as it may on hardware. A capture records all of it. The processes exchange the host memory behind the
tensors over gloo. Its ring algorithm reduces each part of a tensor on one rank and copies the result, so that all ranks
get the same bits, as from the libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from srv.testing.simulated_device.launch import launch
from srv.testing.simulated_device.stream import Event, Stream

if TYPE_CHECKING:
    from srv.testing.simulated_device.accelerator import SimulatedAccelerator

_LOOPBACK = "127.0.0.1"
Launch = Callable[..., None]


class Work:
    """An operation that is enqueued in the group's stream, which ends with `event`."""

    def __init__(self, event: Event, current_stream: Callable[[], Stream]) -> None:
        self._event = event
        self._current_stream = current_stream

    def wait(self) -> bool:
        """Make the current stream wait for the operation; the host does not."""
        self._current_stream().wait_event(self._event)
        return True


class SimulatedProcessGroup:
    """The part of torch.distributed's process groups that srv calls. The constructor waits for all members.

    store: of torch.distributed. timeout: of operations without one of their own. lost(reason): makes the error of an
    operation that a member does not join. The libraries have none: their watchdog ends the process. launch: enqueues
    an operation, as `srv.testing.simulated_device.launch.launch` does without its first argument.
    """

    def __init__(
        self,
        accelerator: SimulatedAccelerator,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        lost: Callable[[str], Exception],
        launch_operation: Launch | None = None,
    ) -> None:
        self._accelerator, self._timeout, self._lost = accelerator, timeout, lost
        self._launch = launch_operation or partial(launch, accelerator)
        self._stream = accelerator.Stream()
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timeout
        self._gloo = gloo(store, rank, size, options)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        """Replace the tensor by the sum over all ranks."""
        if options is None:
            options = dist.AllreduceOptions()
            options.timeout = self._timeout
        return self._enqueue("all_reduce", lambda mine: self._meet(self._gloo.allreduce, mine, options), tensors)

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        """Fill `output`, one contiguous tensor, with the tensors `input` of all ranks, one after the other."""
        return self._enqueue("all_gather", self._gather, output, input)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor) -> Work:
        """Fill `output` with this rank's part of the sum of `input` over all ranks."""
        return self._enqueue("reduce_scatter", partial(self._meet, self._gloo._reduce_scatter_base), output, input)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
    ) -> Work:
        """Exchange rows of `input`: as many with each rank, or the numbers in the lists, which are not empty then."""
        sizes = list(output_split_sizes), list(input_split_sizes)

        def exchange(received: Tensor, own: Tensor) -> None:
            width = max(own.shape[1:].numel(), received.shape[1:].numel()) * own.itemsize
            rows = (each.view(-1, width) for each in _bytes((received, own)))
            self._meet(self._gloo.alltoall_base, *rows, *sizes)

        return self._enqueue("all_to_all", exchange, output, input)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        """Replace the tensor by that of the rank `options.rootRank`."""
        return self._enqueue("broadcast", lambda own: self._meet(self._gloo.broadcast, _bytes(own), options), tensors)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Send the tensor to one rank, which calls `recv`."""
        return self._enqueue("send", lambda own: self._meet(self._gloo.send, _bytes(own), target, tag), tensors)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Replace the tensor by the one that a rank sends."""
        return self._enqueue("recv", lambda own: self._meet(self._gloo.recv, _bytes(own), source, tag), tensors)

    def abort(self) -> None:
        self._gloo.abort()

    def _enqueue(self, name: str, operation: Callable[..., object], *arguments: Any) -> Work:
        accelerator = self._accelerator
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            self._launch(name, operation, *arguments)
        return Work(self._stream.record_event(), accelerator.current_stream)

    def _gather(self, output: Tensor, input: Tensor) -> None:
        self._meet(self._gloo._allgather_base, *_bytes((output, input)))

    def _meet(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Perform the operation with the host's views of the tensors."""
        try:
            operation(*arguments).wait()
        except RuntimeError as error:
            raise self._lost(str(error).partition(". This is")[0]) from error


def _bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The bytes of contiguous tensors: gloo has not all types."""
    return [each.view(-1).view(torch.uint8) for each in tensors]
