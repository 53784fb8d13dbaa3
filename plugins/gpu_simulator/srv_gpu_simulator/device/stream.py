"""Streams and events with the API of `torch.cuda`, and the streams that belong to a capture.

During a capture, a stream takes part if it waits for an event that was recorded in a stream of the capture, and it must
be joined again: the capturing stream waits, directly or through others, for an event behind its last operator. While
a thread captures, waiting for and querying streams and events are refused, as CUDA refuses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from srv.testing.simulated_device import stream
from srv.testing.simulated_device.vendor import TimedEvent, VendorStream

if TYPE_CHECKING:
    from srv_gpu_simulator.device.accelerator import Accelerator

_AFTER = "do it after the capture has ended"


class Stream(VendorStream):
    """A queue of operations. Created with `torch.gpusim.Stream()`."""

    def __init__(self, accelerator: Accelerator, device: object = None, priority: int = 0) -> None:
        super().__init__(accelerator, device, priority)
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


class Event(TimedEvent):
    """A point in a stream. An event that was never recorded is complete. Created with `torch.gpusim.Event()`."""

    # The capture and the stream in which it was recorded.
    _captured: Any = None
    _recorded_in: stream.Stream | None = None

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
