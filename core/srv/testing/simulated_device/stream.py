"""Streams and events, and errors of a host that does not wait for them.

Operators run immediately and in program order, so device memory is always up to date. A stream delays only what the
*host* can see: copies to host memory with `non_blocking=True`, and events. They complete in order when the host waits
(`synchronize` of the stream or of a later event, a blocking copy, `item()`), or one at a time with `query`. A program
that reads such a copy without waiting always reads NaN, or the dtype's largest integer; on real hardware it would fail
only occasionally.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

# A device has a bounded queue; if it is full, the host blocks until the oldest operation is complete.
QUEUE_LIMIT = 1024


class Stream:
    """A queue of operations. Created with `torch.<name>.Stream()`; there is one device."""

    def __init__(self, device: object = None) -> None:
        self._pending: deque[Callable[[], None]] = deque()
        # Held while an operation runs, so that a waiting thread waits until it is complete.
        self._lock = threading.RLock()

    def enqueue(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._pending.append(work)
            if len(self._pending) > QUEUE_LIMIT:
                self.advance()

    def advance(self) -> None:
        """Run the oldest operation, if there is one."""
        with self._lock:
            if self._pending:
                self._pending.popleft()()

    def query(self) -> bool:
        """Whether all operations are complete. Each call completes one more operation."""
        done = not self._pending
        self.advance()
        return done

    def synchronize(self) -> None:
        """Wait for all operations enqueued so far."""
        with self._lock:
            while self._pending:
                self.advance()

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the current end of the stream with `event`, or a new one."""
        event = event if event is not None else Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Delay later operations of this stream until `event`, as recorded now, is complete."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Delay later operations of this stream until those enqueued in `other` now are complete."""
        self.wait_event(other.record_event())


class StreamPosition:
    """A position in a stream, and the time (seconds) at which it was reached."""

    __slots__ = ("_stream", "reached", "when")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.reached = False
        self.when = 0.0
        stream.enqueue(self._arrive)

    def _arrive(self) -> None:
        self.when = time.perf_counter()
        self.reached = True

    def query(self) -> bool:
        reached = self.reached
        if not reached:
            self._stream.advance()
        return reached

    def wait(self) -> None:
        while not self.reached:
            self._stream.advance()


class Event:
    """A point in a stream. An event that was never recorded is complete, as in torch."""

    def __init__(self) -> None:
        self._position: StreamPosition | None = None

    def record(self, stream: Stream) -> None:
        """Mark the current end of `stream`; recording again moves the event."""
        self._position = StreamPosition(stream)

    def query(self) -> bool:
        """Whether the event is complete. Each call completes one more operation."""
        return self._position is None or self._position.query()

    def synchronize(self) -> None:
        """Block until all operations enqueued before the event are complete."""
        if self._position is not None:
            self._position.wait()

    def wait(self, stream: Stream) -> None:
        """Delay later operations of `stream` until the event, as recorded now, is complete."""
        if self._position is not None:
            stream.enqueue(self._position.wait)


def enqueue_copy(stream: Stream, source: Tensor, destination: Tensor) -> None:
    """Enqueue a copy from `source`, a host view of device memory, to `destination` in host memory.

    The device reads the source in program order, hence the snapshot; the host sees it after waiting.
    """
    snapshot = source.clone()
    poison(destination)

    def deliver() -> None:
        # The destination may be an inference tensor, which can only be written in inference mode.
        with torch.inference_mode():
            destination.copy_(snapshot)

    stream.enqueue(deliver)


def poison(tensor: Tensor) -> None:
    """Fill with values that no program expects: NaN, True, or the dtype's largest integer."""
    with torch.inference_mode():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        elif not tensor.is_quantized:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
