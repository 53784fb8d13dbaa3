"""Graphs: operators recorded once and replayed on the same storages.

    with torch.<name>.graph(graph):   every operator of this thread runs, and is recorded
        y = work(x)
    x.copy_(new); graph.replay()      the same operators, the same memory: y is rewritten

As on hardware, host values such as numbers, shapes and lists stay as they were captured. The exception is a keyword
argument, which `update` can change, as some devices do for the lengths of attention. A capture must not wait for the
device, nor copy to or from host memory. Results of recorded operators are in the graph's own memory, where a block is
reused after its tensor is freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.memory import Allocation, Blocks, DeviceMemory
from srv.testing.simulated_device.placement import operator_name
from srv.testing.simulated_device.refusals import Refusals

# Operations that are not permitted in a capture, and what to do instead.
CROSSING = (
    "a copy between host and device",
    "copy into a tensor that exists before the capture, and read results after the replay",
)
READING = ("reading a number on the host", "it waits for the device; read it after the replay")
WAITING = ("synchronize", "wait after the replay")


DATA_DEPENDENT = "the size or value of its result depends on data"


def may_depend_on_data(operator: torch._ops.OpOverload) -> bool:
    """Whether the size or value of an operator's result may depend on data, so that the host must wait for it."""
    return torch.Tag.dynamic_output_shape in operator.tags or torch.Tag.data_dependent_output in operator.tags


def depends_on_data(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it does in this call: an integer index has the size of its result, a mask does not."""
    if operator._schema.name == "aten::index":
        return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if operator._schema.name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return may_depend_on_data(operator)


def random_source(operator: torch._ops.OpOverload) -> str:
    """Where an operator gets random numbers from: "generator" (an argument), "global", or "" if it draws none."""
    if any(argument.name == "generator" for argument in operator._schema.arguments):
        return "generator"
    return "global" if torch.Tag.nondeterministic_seeded in operator.tags else ""


class GraphMemory:
    """Device memory of one graph, or of several that never replay concurrently."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._blocks: dict[int, Allocation] = {}
        self._free: list[torch.UntypedStorage] = []

    def place(self, host: Tensor) -> Tensor:
        """`host` itself, or a copy of it in the smallest free block that is large enough."""
        needed = host.untyped_storage().nbytes()
        fitting = [block for block in self._free if block.nbytes() >= needed] if needed else []
        if not fitting:
            return host
        block = min(fitting, key=lambda candidate: candidate.nbytes())
        self._free = [other for other in self._free if other is not block]
        placed = torch.empty(0, dtype=host.dtype)
        placed.set_(block, 0, host.shape, host.stride())
        return placed.copy_(host)

    def allocate(self, host: torch.UntypedStorage) -> Lease:
        """Lease `host`, which counts as device memory from its first lease on."""
        if host.nbytes() and host.data_ptr() not in self._blocks:
            self._blocks[host.data_ptr()] = self._memory.allocate(host)
        return Lease(self, host)

    def release(self, block: torch.UntypedStorage, address: int) -> None:
        """address: that of the block when it was leased; an operator with `out=` may have moved it to larger memory."""
        if block.data_ptr() != address:
            self._blocks.pop(address, None)
        elif block.nbytes():
            self._free.append(block)


class Lease:
    """A block used by one device storage, and free again after that is freed. `host`: as in `Allocation`."""

    __slots__ = ("_address", "_memory", "host")

    def __init__(self, memory: GraphMemory, host: torch.UntypedStorage) -> None:
        self._memory = memory
        self._address = host.data_ptr()
        self.host = host

    def __del__(self) -> None:
        self._memory.release(self.host, self._address)


@dataclass(slots=True)
class Call:
    """One recorded operator on host views. `targets`: where each result goes; None: it is a written argument."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor | None, ...]

    def run(self) -> None:
        result = self.function(*self.args, **self.kwargs)
        for target, value in zip(self.targets, _flatten(result) if self.targets else (), strict=True):
            if target is None:
                continue
            if target.shape != value.shape:
                raise RuntimeError(
                    f"{self.name} returns {tuple(value.shape)} now and returned {tuple(target.shape)} when "
                    "it was captured; only values may change between capture and replay"
                )
            target.copy_(value)


class Graph:
    """The operators of one capture. It is created empty; `torch.<name>.graph(graph)` captures into it, once."""

    def __init__(self, enqueue: Callable[[Callable[[], object]], None] | None = None) -> None:
        """`enqueue`: how to run a replay in order with the device's stream; None: at once."""
        self._enqueue = enqueue
        self._calls: list[Call] = []
        self._memory: Blocks | None = None

    def __len__(self) -> int:
        """The number of recorded operators."""
        return len(self._calls)

    @property
    def memory(self) -> Blocks:
        """The memory of tensors that are created during the capture."""
        if self._memory is None:
            raise RuntimeError("this graph was never captured")
        return self._memory

    def update(self, **arguments: Any) -> None:
        """Replace these keyword arguments of recorded operators; KeyError if no operator has one."""
        for name, value in arguments.items():
            calls = [call for call in self._calls if name in call.kwargs]
            if not calls:
                raise KeyError(f"no recorded operator was given {name} by name")
            for call in calls:
                call.kwargs[name] = value

    def replay(self) -> None:
        """Run the recorded operators. Raises RuntimeError if there are none."""
        if not self._calls:
            raise RuntimeError("this graph was never captured")
        if self._enqueue is None:
            self.run()
            return
        calls = [replace(call, kwargs=dict(call.kwargs)) for call in self._calls]  # with the values of now
        self._enqueue(lambda: _run(calls))

    def run(self) -> None:
        """Run every recorded call in order."""
        _run(self._calls)

    # Called while this graph is captured

    def begin(self, memory: Blocks) -> None:
        """Begin the capture, with results in `memory`."""
        if self._memory is not None:
            raise RuntimeError("this graph was captured before; make a new one")
        self._memory = memory

    def capture_error(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, str] | None:
        """Why `operator` cannot be replayed, as the two arguments of `Refusals.not_permitted`; None if it can."""
        name = operator_name(operator._schema)
        if depends_on_data(operator, args, kwargs):
            return name, DATA_DEPENDENT
        if random_source(operator):
            return f"{name}, which draws random numbers", "draw before the capture"
        if not all("Tensor" in str(result.type) for result in operator._schema.returns):
            return f"{name}, which returns a value to the host", "call it before the capture"
        return None

    def created(self, tensor: Tensor) -> None:
        """Called when a device tensor was created during the capture."""

    def add(self, call: Call, inputs: Sequence[Any]) -> None:
        """Record an operator that has just run on `inputs` (its arguments on the device)."""
        self._calls.append(call)


class Recorder:
    """The current capture: at most one thread at a time, into one graph."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._graph: Graph | None = None
        self._thread = 0

    @property
    def busy(self) -> bool:
        """Whether any thread is capturing."""
        return self._graph is not None

    @property
    def active(self) -> Graph | None:
        """The graph into which this thread is capturing, if any."""
        return self._graph if self._graph is not None and threading.get_ident() == self._thread else None

    def begin(self, graph: Graph, memory: Blocks) -> None:
        """Record this thread's operators into `graph`, with results in `memory`."""
        if self.busy:
            raise RuntimeError(f"{self._refusals.device} is capturing a graph already")
        graph.begin(memory)
        self._graph, self._thread = graph, threading.get_ident()

    def end(self) -> None:
        self._graph = None

    @contextmanager
    def recording(self, graph: Graph, memory: Blocks) -> Iterator[Graph]:
        """`begin` and `end` as a context manager."""
        self.begin(graph, memory)
        try:
            yield graph
        finally:
            self.end()

    def refuse(self, what: str, instead: str) -> None:
        """Raise RuntimeError if this thread is capturing: `what` is not permitted; `instead` says what to do."""
        if self.active is not None:
            raise self._refusals.not_permitted(what, instead)

    def check_capturable(self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise RuntimeError if this thread is capturing and `operator` cannot be replayed."""
        graph = self.active
        error = graph.capture_error(operator, args, kwargs) if graph is not None else None
        if error is not None:
            raise self._refusals.not_permitted(*error)


def _run(calls: Sequence[Call]) -> None:
    # Captured tensors may be inference tensors, which can only be written in inference mode.
    with torch.inference_mode():
        for call in calls:
            call.run()


def _flatten(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [one for value in result for one in _flatten(value)]
    return [result]
