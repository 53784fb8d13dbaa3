"""Streams and events with the API of `torch.npu`: its arguments, its current stream, and times."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from srv.testing.simulated_device import stream

_identities = itertools.count()


class Stream(stream.Stream):
    """A queue of operations. Created with `npu.Stream()`."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        super().__init__()
        self.stream_id = next(_identities)
        self.priority = priority
        self.device = torch.device("npu", 0)

    def record_event(self, event: stream.Event | None = None) -> stream.Event:
        """Mark the current end of the stream with `event`, or a new one."""
        return super().record_event(event if event is not None else Event(lambda: self))


class Event(stream.Event):
    """A point in a stream. An event that was never recorded is complete. Created with `npu.Event()`."""

    def __init__(
        self,
        current_stream: Callable[[], stream.Stream],
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        super().__init__()
        self._current_stream = current_stream
        self._timed = enable_timing

    def record(self, stream: stream.Stream | None = None) -> None:
        """Mark the current end of `stream` (the current one); recording again moves the event."""
        super().record(stream if stream is not None else self._current_stream())

    def wait(self, stream: stream.Stream | None = None) -> None:
        """Delay later operations of `stream` (the current one) until the event, as recorded now, is complete."""
        super().wait(stream if stream is not None else self._current_stream())

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`; RuntimeError unless both are timed and complete."""
        if not (self._timed and end._timed):
            raise RuntimeError("Event.elapsed_time: both events must be created with enable_timing=True")
        if self._position is None or end._position is None or not (self._position.reached and end._position.reached):
            raise RuntimeError("Event.elapsed_time: both events must be recorded and complete; synchronize first")
        return (end._position.when - self._position.when) * 1e3
