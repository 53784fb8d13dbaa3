"""Streams and events with the API of `torch.cuda`, and the streams that belong to a capture.

During a capture, a stream takes part if it waits for an event that was recorded in a stream of the capture, and it must
be joined again: the capturing stream waits, directly or through others, for an event behind its last operator. While
a thread captures, waiting for and querying streams and events are refused, as CUDA refuses them.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from srv.testing.simulated_device import stream

if TYPE_CHECKING:
    from srv_gpu_simulator.device.accelerator import Accelerator

_identities = itertools.count()
_AFTER = "do it after the capture has ended"


class Stream(stream.Stream):
    """A queue of operations. Created with `torch.gpusim.Stream()`."""

    def __init__(self, accelerator: Accelerator, device: object = None, priority: int = 0) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.stream_id = next(_identities)
        self.priority = priority
        self.device = torch.device(accelerator.name, 0)
        accelerator.keep_stream(self)

    def query(self) -> bool:
        self._accelerator.recorder.refuse("Stream.query", _AFTER)
        return super().query()

    def synchronize(self) -> None:
        self._accelerator.recorder.refuse("Stream.synchronize", _AFTER)
        self.drain()

    def drain(self) -> None:
        """Run all operations enqueued so far."""
        super().synchronize()

    def record_event(self, event: stream.Event | None = None) -> stream.Event:
        """Mark the current end of the stream with `event`, or a new one."""
        return super().record_event(event if event is not None else Event(self._accelerator))


class Event(stream.Event):
    """A point in a stream. An event that was never recorded is complete. Created with `torch.gpusim.Event()`."""

    def __init__(
        self,
        accelerator: Accelerator,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._timed = enable_timing
        # The capture and the stream in which it was recorded.
        self._captured: Any = None
        self._recorded_in: stream.Stream | None = None

    def record(self, stream: stream.Stream | None = None) -> None:
        """Mark the current end of `stream` (the current one); recording again moves the event."""
        stream = stream if stream is not None else self._accelerator.current_stream()
        capture = self._accelerator.capture
        self._captured = capture if capture is not None and capture.has(stream) else None
        self._recorded_in = stream
        super().record(stream)

    def wait(self, stream: stream.Stream | None = None) -> None:
        """Delay later operations of `stream` (the current one) until the event, as recorded now, is complete."""
        stream = stream if stream is not None else self._accelerator.current_stream()
        capture = self._accelerator.capture
        if capture is not None:
            if self._captured is capture and self._recorded_in is not None:
                capture.join(self._recorded_in, stream)
            elif capture.has(stream) and self._position is not None:
                raise RuntimeError(
                    "Event.wait: a stream that is being captured cannot wait for an event that was recorded outside "
                    "the capture; wait for it before the capture"
                )
        super().wait(stream)

    def query(self) -> bool:
        self._accelerator.recorder.refuse("Event.query", _AFTER)
        return super().query()

    def synchronize(self) -> None:
        self._accelerator.recorder.refuse("Event.synchronize", _AFTER)
        super().synchronize()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`; RuntimeError unless both are timed and complete."""
        if not (self._timed and end_event._timed):
            raise RuntimeError("Event.elapsed_time: both events must be created with enable_timing=True")
        start, end = self._position, end_event._position
        if start is None or end is None or not (start.reached and end.reached):
            raise RuntimeError("Event.elapsed_time: both events must be recorded and complete; synchronize first")
        return (end.when - start.when) * 1e3
