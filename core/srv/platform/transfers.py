"""Copies between host and device that a step does not wait for.

A copy from ordinary host memory may block the host until the device has caught up, and one that does not block may
read memory that has changed meanwhile. So every copy of a step goes through memory from `Platform.staging`:

    host values ──► staging memory of the step ──► device       `upload`, `update`: in order with the step's work
    device ──► staging memory of the step ──► host values       `download`: behind the step, on a stream of its own

    begin() ──► upload, update, download ... ──► end() ──► StepCopies.wait() ──► read ──► StepCopies.release()

A step's memory is given to a later step after `release` only, which comes after the step's event. On a platform that
computes in host memory nothing is copied: host and device tensors are the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srv.platform.streams import Event, Streams

Staging = Callable[[tuple[int, ...], torch.dtype], Tensor]


class _Platform(Protocol):
    """The members of `srv.platform.interface.Platform` that copies need."""

    def streams(self, device: torch.device) -> Streams: ...
    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


_ALIGNMENT = 64  # bytes
_BLOCK = 1 << 20  # bytes of the first block that is requested from the platform; each further one is twice as large


class _Arena:
    """The staging memory of one step, in blocks that are kept for later steps. `pending`: copies to be started."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._blocks: list[Tensor] = []
        self._block = 0  # the block in use
        self._used = 0  # its bytes
        self.pending: list[tuple[Tensor, Tensor]] = []

    @property
    def empty(self) -> bool:
        return self._used == 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        while self._block < len(self._blocks) and self._used + size > self._blocks[self._block].numel():
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            least = 2 * self._blocks[-1].numel() if self._blocks else _BLOCK  # as sizes grow, there are few blocks
            with torch.inference_mode(False):  # also written outside inference mode
                self._blocks.append(self._staging((max(size, least),), torch.uint8))
        begin = self._used
        self._used = -(-(begin + size) // _ALIGNMENT) * _ALIGNMENT
        return self._blocks[self._block][begin : begin + size].view(dtype).view(shape)

    def reset(self) -> None:
        self._block = self._used = 0
        self.pending = []


class StepCopies:
    """The copies of one step, all of which have been started."""

    def __init__(self, event: Event, free: Callable[[], None]) -> None:
        self._event, self._free = event, free

    def wait(self) -> None:
        """Block until the step and its copies to the host are done."""
        self._event.synchronize()

    def release(self) -> None:
        """The values have been read: what `download` returned for this step must not be used any more."""
        self._free()


class Transfers:
    """The copies of one worker. Used from the thread that runs steps; `StepCopies` from any."""

    def __init__(self, platform: _Platform, device: torch.device) -> None:
        self.device = device
        self.streams = platform.streams(device)
        self._staging: Staging = platform.staging
        self._shared = platform.staging((0,), torch.uint8).device == device  # the device computes in host memory
        self._arena = _Arena(self._staging)
        self._free: deque[_Arena] = deque()

    def begin(self) -> None:
        """Begin a step. The memory of the last one is left to its `StepCopies`.

        It waits for the device only if there were uploads outside steps, or in a step that failed.
        """
        if self._shared:
            return
        if not self._arena.empty:
            outside = self.end()
            outside.wait()
            outside.release()
        self._arena = self._free.popleft() if self._free else _Arena(self._staging)

    def end(self) -> StepCopies:
        """Start the copies to the host, behind everything that is enqueued for computing."""
        computed = self.streams.compute.record()
        if self._shared:
            return StepCopies(computed, _nothing)
        arena, copies = self._arena, self.streams.copy_out
        self._arena = _Arena(self._staging)  # for uploads outside steps
        if not arena.pending:
            return StepCopies(computed, lambda: self._reuse(arena))
        copies.wait(computed)
        with copies.use(), torch.inference_mode():
            for host, tensor in arena.pending:
                host.copy_(tensor, non_blocking=True)
        return StepCopies(copies.record(), lambda: self._reuse(arena))

    def _reuse(self, arena: _Arena) -> None:
        arena.reset()
        self._free.append(arena)

    def upload(self, values: Tensor | npt.NDArray[Any]) -> Tensor:
        """`values`, a host tensor or array, as a tensor of the same shape and dtype on the device.

        The caller may change them at once, but not where the device computes in host memory.
        """
        source = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        return source if self._shared else self._staged(source).to(self.device, non_blocking=True)

    def upload_integers(self, values: Sequence[int]) -> Tensor:
        """int64 [len(values)] on the device."""
        return self.upload(torch.tensor(values, dtype=torch.int64))

    def update(self, target: Tensor, values: Tensor) -> None:
        """Overwrite `target`, on the device, with `values`, a host tensor of the same shape."""
        target.copy_(values if self._shared else self._staged(values), non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        """A host tensor with the values that `tensor` has when the step is done; valid after `StepCopies.wait`.

        `tensor` must not be overwritten by later steps.
        """
        if self._shared:
            return tensor
        host = self._arena.take(tuple(tensor.shape), tensor.dtype)
        self._arena.pending.append((host, tensor))
        return host

    def _staged(self, values: Tensor) -> Tensor:
        return self._arena.take(tuple(values.shape), values.dtype).copy_(values)


def _nothing() -> None:
    """Host memory that the device computes in belongs to no step."""
