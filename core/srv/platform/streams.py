"""Streams and events: the order of a device's work, and copies that overlap with computing. Torch-free.

`HostStream` is for platforms that compute in host memory, `AcceleratorStream` for those whose torch backend has the
usual functions (`torch.<name>.Stream`, `.stream`, `.current_stream`). A platform may bring its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block this thread until everything enqueued before the event is done."""


class Stream(Protocol):
    """A queue of a device's work, which is done in order. Work of different streams may run at the same time."""

    def record(self) -> Event:
        """An event behind everything that is enqueued in this stream now."""

    def wait(self, event: Event) -> None:
        """Work that is enqueued in this stream from now on begins after `event`, which any stream of the device has
        recorded. The host does not wait.
        """

    def use(self) -> AbstractContextManager[object]:
        """What this thread enqueues inside the context goes to this stream."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one worker, by purpose.

    compute: the stream of all work outside `use`. copy_in, copy_out: for large copies to and from the device. They may
    be the same object.
    """

    compute: Stream
    copy_in: Stream
    copy_out: Stream


class _Done:
    """An event of a device without a queue: all work before it is done."""

    def synchronize(self) -> None:
        return None


class HostStream:
    """The stream of a device on which every call returns when its work is done."""

    def __init__(self) -> None:
        self._done = _Done()

    def record(self) -> Event:
        return self._done

    def wait(self, event: Event) -> None:
        event.synchronize()

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()


class AcceleratorStream:
    """A stream of a torch backend. `module` is `torch.<name>`, `stream` one of its streams."""

    def __init__(self, module: Any, stream: Any) -> None:
        self._module, self._stream = module, stream

    def record(self) -> Event:
        event: Event = self._stream.record_event()
        return event

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)

    def use(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._module.stream(self._stream)
        return context


def host_streams() -> Streams:
    """One stream for all purposes, of a platform that computes in host memory."""
    stream = HostStream()
    return Streams(stream, stream, stream)


def accelerator_streams(module: Any, device: object) -> Streams:
    """The device's current stream for computing, and two new ones for copies. `module`: `torch.<name>`."""
    streams = (module.current_stream(device), module.Stream(device), module.Stream(device))
    return Streams(*(AcceleratorStream(module, stream) for stream in streams))
