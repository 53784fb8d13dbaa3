"""Graphs: the operators of a piece of work, recorded once and replayed on the same storages.

    with torch.<name>.graph(graph):   every operator of this thread runs, and is recorded
        y = work(x)
    x.copy_(new); graph.replay()      the same operators, the same memory: y is rewritten

As on hardware, what the host knew during the capture stays as it was: numbers, shapes and lists are part of what
is recorded. The one exception is an argument that an operator was given by name, which `update` changes: so some
devices' graphs do with the lengths of attention. A capture may not wait for the device, nor cross to or from host
memory. What recorded operators make lies in the graph's own memory, where a block serves again when its tensor
is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.memory import Allocation, Blocks, DeviceMemory
from srv.testing.simulated_device.placement import operator_name
from srv.testing.simulated_device.refusals import Refusals

# What a capture may not do, and what to do instead.
CROSSING = (
    "a copy between host and device",
    "copy into a tensor that exists before the capture, and read results after the replay",
)
READING = ("reading a number on the host", "it waits for the device; read it after the replay")
WAITING = ("synchronize", "wait after the replay")


DATA_DEPENDENT = "the size or value of its result depends on data"


def may_depend_on_data(operator: torch._ops.OpOverload) -> bool:
    """Whether the host may have to wait for the size or the value of an operator's result."""
    return torch.Tag.dynamic_output_shape in operator.tags or torch.Tag.data_dependent_output in operator.tags


def depends_on_data(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it has to in this call: an index of numbers is as long as its result, a mask is not."""
    if operator._schema.name == "aten::index":
        return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if operator._schema.name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return may_depend_on_data(operator)


def draws(operator: torch._ops.OpOverload) -> str:
    """How an operator comes to its random numbers: "generator" (an argument), "global", or "" if it draws none."""
    if any(argument.name == "generator" for argument in operator._schema.arguments):
        return "generator"
    return "global" if torch.Tag.nondeterministic_seeded in operator.tags else ""


class GraphMemory:
    """Device memory of one graph, or of several that are never replayed at once."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._blocks: dict[int, Allocation] = {}
        self._free: list[torch.UntypedStorage] = []

    def place(self, host: Tensor) -> Tensor:
        """`host` itself, or a copy of it in the smallest free block that holds it."""
        needed = host.untyped_storage().nbytes()
        fitting = [block for block in self._free if block.nbytes() >= needed] if needed else []
        if not fitting:
            return host
        block = min(fitting, key=lambda each: each.nbytes())
        self._free = [each for each in self._free if each is not block]
        placed = torch.empty(0, dtype=host.dtype)
        placed.set_(block, 0, host.shape, host.stride())
        return placed.copy_(host)

    def allocate(self, host: torch.UntypedStorage) -> Lease:
        """Lend `host`, which is counted as device memory from its first lease on."""
        if host.nbytes() and host.data_ptr() not in self._blocks:
            self._blocks[host.data_ptr()] = self._memory.allocate(host)
        return Lease(self, host)

    def give_back(self, block: torch.UntypedStorage) -> None:
        if block.nbytes():
            self._free.append(block)


class Lease:
    """A block in the hands of one device storage; it is free again when that is gone. `host` as in `Allocation`."""

    __slots__ = ("_memory", "host")

    def __init__(self, memory: GraphMemory, host: torch.UntypedStorage) -> None:
        self._memory = memory
        self.host = host

    def __del__(self) -> None:
        self._memory.give_back(self.host)


@dataclass(slots=True)
class Call:
    """One recorded operator, over host views. `targets`: where each result goes; None: an argument was written."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor | None, ...]

    def run(self) -> None:
        result = self.function(*self.args, **self.kwargs)
        for target, value in zip(self.targets, _flat(result) if self.targets else (), strict=True):
            if target is None:
                continue
            if target.shape != value.shape:
                raise RuntimeError(
                    f"{self.name} gives {tuple(value.shape)} now and gave {tuple(target.shape)} when "
                    "it was captured; only values may change between capture and replay"
                )
            target.copy_(value)


class Graph:
    """What one capture recorded. Made empty; `torch.<name>.graph(graph)` fills it, once."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._memory: Blocks | None = None

    def __len__(self) -> int:
        """Operators recorded."""
        return len(self._calls)

    @property
    def memory(self) -> Blocks:
        """Where tensors come from that are made during the capture."""
        if self._memory is None:
            raise RuntimeError("this graph was never captured")
        return self._memory

    def update(self, **arguments: Any) -> None:
        """New values for what recorded operators were given by these names; KeyError if none was."""
        for name, value in arguments.items():
            given = [call for call in self._calls if name in call.kwargs]
            if not given:
                raise KeyError(f"no recorded operator was given {name} by name")
            for call in given:
                call.kwargs[name] = value

    def replay(self) -> None:
        """Run what was recorded. RuntimeError if nothing was."""
        if not self._calls:
            raise RuntimeError("this graph was never captured")
        self.run()

    def run(self) -> None:
        """Every recorded call, in order."""
        # What was captured may be inference tensors, which may only be written in inference mode.
        with torch.inference_mode():
            for call in self._calls:
                call.run()

    # Called while this graph is captured

    def begin(self, memory: Blocks) -> None:
        """The capture begins; what it makes lies in `memory`."""
        if self._memory is not None:
            raise RuntimeError("this graph was captured before; make a new one")
        self._memory = memory

    def objection(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, str] | None:
        """Why a replay could not do `operator` again, as the refusal's two parts; None if it can."""
        name = operator_name(operator._schema)
        if depends_on_data(operator, args, kwargs):
            return name, DATA_DEPENDENT
        if draws(operator):
            return f"{name}, which draws random numbers", "draw before the capture"
        if not all("Tensor" in str(result.type) for result in operator._schema.returns):
            return f"{name}, which answers to the host", "ask before the capture"
        return None

    def created(self, tensor: Tensor) -> None:
        """Device memory was made during the capture."""

    def add(self, call: Call, inputs: Sequence[Any]) -> None:
        """Record an operator that has just run on `inputs`, as they were given to the device."""
        self._calls.append(call)


class Recorder:
    """Who is being recorded: at most one thread at a time, into one graph."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._graph: Graph | None = None
        self._thread = 0

    @property
    def busy(self) -> bool:
        """Whether any thread is recorded now."""
        return self._graph is not None

    @property
    def active(self) -> Graph | None:
        """The graph that this thread's operators belong to now."""
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
        """`begin` and `end`."""
        self.begin(graph, memory)
        try:
            yield graph
        finally:
            self.end()

    def refuse(self, what: str, instead: str) -> None:
        """RuntimeError if this thread is recorded: `what` cannot be part of a graph, `instead` says what to do."""
        if self.active is not None:
            raise self._refusals.in_a_capture(what, instead)

    def admit(self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """RuntimeError if this thread is recorded and a replay could not do `operator` again."""
        graph = self.active
        objection = graph.objection(operator, args, kwargs) if graph is not None else None
        if objection is not None:
            raise self._refusals.in_a_capture(*objection)


def _flat(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [one for value in result for one in _flat(value)]
    return [result]
