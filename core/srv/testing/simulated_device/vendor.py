"""What simulated backends of vendors have in common: the module of a card, timed events, and graphs.

    VendorAccelerator   a card that is known by its key, with statistics of its memory
    VendorStream        numbered, as `torch.cuda.Stream`
    TimedEvent          in the current stream unless another is given, with the time between two
    VendorGraph         captured, replayed and reset
    Capture             what a graph has captured: its results hold nothing before a replay, and its inputs must stay

Names and messages are those of each vendor, which `kind`, `noun` and `title` give.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from srv.testing.simulated_device.accelerator import SimulatedAccelerator, install
from srv.testing.simulated_device.graphs import DATA_DEPENDENT, Call, Graph, depends_on_data
from srv.testing.simulated_device.memory import Allocation, Block, Blocks
from srv.testing.simulated_device.placement import operator_name
from srv.testing.simulated_device.refusals import Refusals
from srv.testing.simulated_device.stream import Event, Stream, poison
from srv.testing.simulated_device.tensors import block_of, host_view, is_device_tensor

_identities = itertools.count()


class VendorStream(Stream):
    """A queue of operations. Created with `torch.<name>.Stream()`."""

    def __init__(self, accelerator: VendorAccelerator, device: object = None, priority: int = 0) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.stream_id = next(_identities)
        self.priority = priority
        self.device = torch.device(accelerator.name, 0)

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the current end of the stream with `event`, or a new one."""
        return super().record_event(event if event is not None else self._accelerator.Event())


class TimedEvent(Event):
    """A point in a stream. An event that was never recorded is complete. Created with `torch.<name>.Event()`."""

    def __init__(
        self,
        accelerator: VendorAccelerator,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Mark the current end of `stream` (the current one); recording again moves the event."""
        super().record(stream if stream is not None else self._accelerator.current_stream())

    def wait(self, stream: Stream | None = None) -> None:
        """Delay later operations of `stream` (the current one) until the event, as recorded now, is complete."""
        super().wait(stream if stream is not None else self._accelerator.current_stream())

    def elapsed_time(self, end_event: TimedEvent) -> float:
        """Milliseconds from this event to `end_event`; RuntimeError unless both are timed and complete."""
        if not (self._timed and end_event._timed):
            raise RuntimeError("Event.elapsed_time: both events must be created with enable_timing=True")
        start, end = self._position, end_event._position
        if start is None or end is None or not (start.reached and end.reached):
            raise RuntimeError("Event.elapsed_time: both events must be recorded and complete; synchronize first")
        return (end.when - start.when) * 1e3


class Capture(Graph):
    """What one graph has captured. kind: the name of the graph's class, for messages."""

    def __init__(self, kind: str, enqueue: Callable[[Callable[[], object]], None]) -> None:
        super().__init__(enqueue)
        self._kind = kind
        self._in_order = enqueue
        self._created: list[Tensor] = []
        self._inputs: dict[int, tuple[str, weakref.ref[Block]]] = {}

    def owns(self, block: Block) -> bool:
        """Whether a block is memory of graphs; others are inputs."""
        return not isinstance(block, Allocation)

    def capture_error(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, str] | None:
        """Random numbers are permitted, and each replay draws new ones."""
        return (operator_name(operator._schema), DATA_DEPENDENT) if depends_on_data(operator, args, kwargs) else None

    def created(self, tensor: Tensor) -> None:
        # The view keeps the host memory, and lets the block be reused when the tensor is freed.
        self._created.append(host_view(tensor))

    def add(self, call: Call, inputs: Sequence[Any]) -> None:
        for block in map(block_of, _device_tensors(inputs)):
            if not self.owns(block):
                self._inputs.setdefault(id(block), (call.name, weakref.ref(block)))
        super().add(call, inputs)

    def finish(self) -> None:
        """Poison the results after the capture: a program must not read them before a replay."""
        for view in self._created:
            poison(view)
        self._created.clear()

    def replay(self) -> None:
        for name, reference in self._inputs.values():
            if reference() is None:
                raise RuntimeError(
                    f"{self._kind}.replay: memory that the captured {name} uses has been freed since the capture; "
                    "keep every input and output of a graph alive for as long as the graph"
                )
        self._in_order(self.run)


_Capture = TypeVar("_Capture", bound=Capture)


class VendorGraph:
    """A graph of a vendor's module; a subclass adds `capture_begin`, and names itself."""

    kind = "Graph"

    def __init__(self, accelerator: VendorAccelerator) -> None:
        self._accelerator = accelerator
        self._capture: Capture | None = None
        self._ended = False

    def check_free(self) -> None:
        """Raise RuntimeError if this graph holds a capture, or another capture is under way."""
        if self._capture is not None:
            raise RuntimeError(f"{self.kind}.capture_begin: this graph holds a capture; call reset() first")
        if self._accelerator.recorder.busy:
            raise RuntimeError(f"{self.kind}.capture_begin: another capture is under way, and captures do not nest")

    def begin(self, capture: Capture, memory: Blocks) -> None:
        """Record this thread's operators into `capture`, with results in `memory`."""
        self._accelerator.recorder.begin(capture, memory)
        self._capture, self._ended = capture, False

    def capture_end(self) -> None:
        if self._capture is None or self._ended:
            raise RuntimeError(f"{self.kind}.capture_end: nothing is being captured into this graph")
        self._accelerator.recorder.end()
        self._ended = True
        try:
            self._capture.finish()
        except RuntimeError:
            self._capture = None
            raise

    def abandon(self) -> None:
        """End and discard a failed capture."""
        self._accelerator.recorder.end()
        self._capture = None

    def replay(self) -> None:
        """Run the captured operators on the captured memory, in the current stream."""
        self._accelerator.recorder.refuse(f"{self.kind}.replay", "replay after the capture has ended")
        self.captured("replay", Capture).replay()

    def captured(self, what: str, kind: type[_Capture]) -> _Capture:
        """What was captured. RuntimeError, for the method `what`, if nothing was."""
        if not isinstance(self._capture, kind) or not self._ended:
            raise RuntimeError(f"{self.kind}.{what}: nothing was captured into this graph; use `graph(...)` first")
        return self._capture

    def reset(self) -> None:
        """Release the capture and its memory."""
        self._capture = None


class Card(Protocol):
    """A product that can be simulated. key: by which it is asked for."""

    @property
    def key(self) -> str: ...
    @property
    def device_name(self) -> str: ...


class VendorAccelerator(SimulatedAccelerator):
    """`torch.<name>` of a vendor. noun: what its messages call the card. capturing: see `Refusals`."""

    noun = "device"
    capturing = "while a stream is being captured into a graph"
    stream_type: Callable[..., VendorStream] = VendorStream
    event_type: Callable[..., TimedEvent] = TimedEvent

    def __init__(self, name: str, card: Card, capacity: int, asynchronous: bool, devices: int) -> None:
        refusals = Refusals(
            f"{name}:0",
            mixed="{operator}: expected all tensors to be on the same device, but was given {places}. "
            "Move them to one first; only 0-dim host tensors that are no index, and copies, may mix.",
            exhausted=f"{self.noun} out of memory. Tried to allocate {{nbytes}} bytes on {{device}} (simulated), "
            "but {free} of {capacity} are free. Use less of it: a smaller batch, or a smaller KV pool.",
            capturing=self.capturing,
        )
        super().__init__(
            name,
            capacity,
            device_name=card.device_name,
            refusals=refusals,
            asynchronous=asynchronous,
            devices=devices,
        )
        self.loaded = _described(card, capacity, asynchronous, devices)
        self.Stream = partial(self.stream_type, self)
        self.Event = partial(self.event_type, self)
        self._default_stream = self.Stream()
        self._capture_stream = self.Stream()

    def memory_reserved(self, device: object = None) -> int:
        return self.memory.allocated

    def memory_stats(self, device: object = None) -> dict[str, int]:
        kinds = {"current": self.memory.allocated, "peak": self.memory.peak}
        return {f"{of}_bytes.all.{kind}": size for of in ("allocated", "reserved") for kind, size in kinds.items()}

    @contextmanager
    def capturing_into(self, graph: Any, stream: Stream | None, *arguments: Any) -> Iterator[None]:
        """Capture this thread's operators into `graph`, in `stream` or a stream of its own."""
        self.synchronize()
        with self.stream(stream if stream is not None else self._capture_stream):
            graph.capture_begin(*arguments)
            try:
                yield
            except BaseException:
                graph.abandon()
                raise
            graph.capture_end()


_Accelerator = TypeVar("_Accelerator", bound=VendorAccelerator)


def install_card(
    name: str,
    kind: type[_Accelerator],
    make: Callable[[Card, int, bool, int], _Accelerator],
    card: Card,
    capacity: int,
    asynchronous: bool,
    devices: int,
) -> _Accelerator:
    """Register the card, one of `devices` that are alike, once per process, and return `torch.<name>`.

    RuntimeError if another backend has claimed PrivateUse1, or another card was simulated here before.
    """
    title = f"the {kind.noun} simulator"
    present = install(name, kind, lambda: make(card, capacity, asynchronous, devices), title)
    simulated = _described(card, capacity, asynchronous, devices)
    if present.loaded != simulated:
        raise RuntimeError(
            f"{title} was loaded as {present.loaded} here, and cannot become {simulated}: one process simulates one "
            f"{kind.noun}"
        )
    return present


def _described(card: Card, capacity: int, asynchronous: bool, devices: int) -> str:
    alike = "" if devices == 1 else f"one of {devices} times "
    return f"{alike}{card.key!r} with {capacity} bytes{', asynchronous' if asynchronous else ''}"


def _device_tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The device tensors among `values`, also in lists and tuples."""
    for value in values:
        if is_device_tensor(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _device_tensors(value)
