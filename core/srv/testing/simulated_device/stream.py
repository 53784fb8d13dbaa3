"""Streams and events: what the host must wait for, and what happens if it does not.

Operators run at once and in program order, so the device's own view of its memory is always in order. What a
stream holds back is what only the *host* can see: copies to host memory that were asked for with
`non_blocking=True`, and events. They arrive in order when the host waits (`synchronize` of the stream, of a
later event, a blocking copy, `item()`), or, one at a time, when it looks (`query`). A program that reads
such a copy before it has waited reads NaN, or the dtype's largest integer, here every time; on real hardware it
would fail now and then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

# A device has a bounded queue; when it is full the host is held up until the oldest work is done.
QUEUE_LIMIT = 1024


class Stream:
    """Work in order. Created through `torch.<name>.Stream()`."""

    def __init__(self) -> None:
        self._pending: deque[Callable[[], None]] = deque()
        # Held while a piece of work is done, so that another thread that waits for it really waits.
        self._lock = threading.RLock()

    def enqueue(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._pending.append(work)
            if len(self._pending) > QUEUE_LIMIT:
                self.advance()

    def advance(self) -> None:
        """Do the oldest piece of work, if there is one."""
        with self._lock:
            if self._pending:
                self._pending.popleft()()

    def query(self) -> bool:
        """Whether all work is done. Time passes by one piece of work each time the host looks."""
        done = not self._pending
        self.advance()
        return done

    def synchronize(self) -> None:
        """Wait for all work enqueued so far."""
        with self._lock:
            while self._pending:
                self.advance()

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the present end of the stream with `event`, or a new one."""
        event = event if event is not None else Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Hold later work of this stream back until `event`, as it is recorded now, is complete."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Hold later work of this stream back until what `other` now holds is done."""
        self.wait_event(other.record_event())


class Mark:
    """One place in one stream, and the moment (seconds) at which it was reached."""

    __slots__ = ("_stream", "reached", "when")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.reached = False
        self.when = 0.0
        stream.enqueue(self._arrive)

    def _arrive(self) -> None:
        self.when = time.perf_counter()
        self.reached = True

    def look(self) -> bool:
        reached = self.reached
        if not reached:
            self._stream.advance()
        return reached

    def wait(self) -> None:
        while not self.reached:
            self._stream.advance()


class Event:
    """A point in a stream. One that was never recorded counts as complete, as elsewhere in torch."""

    def __init__(self) -> None:
        self._mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        """Mark the present end of `stream`; recording again moves the event."""
        self._mark = Mark(stream)

    def query(self) -> bool:
        """Whether the event is complete. Time passes by one piece of work each time the host looks."""
        return self._mark is None or self._mark.look()

    def synchronize(self) -> None:
        """Block until everything enqueued before the event is done."""
        if self._mark is not None:
            self._mark.wait()

    def wait(self, stream: Stream) -> None:
        """Hold later work of `stream` back until the event, as it is recorded now, is complete."""
        if self._mark is not None:
            stream.enqueue(self._mark.wait)


def deliver_later(stream: Stream, source: Tensor, destination: Tensor) -> None:
    """Enqueue a copy from `source`, a host view of device memory, to `destination` in host memory.

    The device reads the source in program order, hence the snapshot; the host sees it when it has waited.
    """
    snapshot = source.clone()
    poison(destination)

    def deliver() -> None:
        # The destination may be an inference tensor, which may only be written in inference mode.
        with torch.inference_mode():
            destination.copy_(snapshot)

    stream.enqueue(deliver)


def poison(tensor: Tensor) -> None:
    """Fill with what no program expects: NaN, True, or the dtype's largest integer."""
    with torch.inference_mode():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        elif not tensor.is_quantized:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
