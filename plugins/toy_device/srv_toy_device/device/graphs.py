"""Graphs: the operators of a piece of work, recorded once and replayed on the same storages.

    with torch.toy.graph(graph):      every operator of this thread runs, and is recorded
        y = work(x)
    x.copy_(new); graph.replay()      the same operators, the same memory: y is rewritten

As on hardware, what the host knew during the capture stays as it was: numbers, shapes and lists are part of what
is recorded. The one exception is an argument that an operator was given by name, which `update` changes (so do
Ascend's graphs with the lengths of attention). A capture may not wait for the device, nor cross to or from host
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

from srv_toy_device.device.memory import Allocation, DeviceMemory


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

    def allocate(self, block: torch.UntypedStorage) -> Lease:
        """Lend `block`, which is counted as device memory from its first lease on."""
        if block.nbytes() and block.data_ptr() not in self._blocks:
            self._blocks[block.data_ptr()] = self._memory.allocate(block)
        return Lease(self, block)

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
class _Call:
    """One operator of a graph. `made`: host views of its new results; () if it writes its arguments."""

    operator: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    made: tuple[Tensor, ...]

    def run(self) -> None:
        result = self.operator(*self.args, **self.kwargs)
        if self.made:
            for place, value in zip(self.made, result if isinstance(result, (list, tuple)) else (result,), strict=True):
                place.copy_(value)


class Graph:
    """What one capture recorded. Made empty; `torch.toy.graph(graph)` fills it, once."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._memory: GraphMemory | None = None

    def __len__(self) -> int:
        """Operators recorded."""
        return len(self._calls)

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
        with torch.inference_mode():
            for call in self._calls:
                call.run()

    def begin(self, memory: GraphMemory) -> None:
        """Called by `Recorder`."""
        if self._memory is not None:
            raise RuntimeError("this graph was captured before; make a new one")
        self._memory = memory

    def add(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Called by `Recorder`, for an operator that has just run."""
        self._calls.append(_Call(operator, list(args), dict(kwargs), tuple(made)))


class Recorder:
    """Who is being recorded: at most one thread at a time, into one graph."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._device_memory = memory
        self._graph: Graph | None = None
        self._thread = 0
        self.memory: GraphMemory | None = None

    @property
    def active(self) -> bool:
        """Whether this thread's operators are recorded now."""
        return self._graph is not None and threading.get_ident() == self._thread

    @contextmanager
    def recording(self, graph: Graph, memory: GraphMemory | None) -> Iterator[Graph]:
        """Record this thread's operators into `graph`, with results in `memory` (None: its own)."""
        if self._graph is not None:
            raise RuntimeError("toy:0 is capturing a graph already")
        self.memory = memory or GraphMemory(self._device_memory)
        graph.begin(self.memory)
        self._graph, self._thread = graph, threading.get_ident()
        try:
            yield graph
        finally:
            self._graph = self.memory = None

    def add(
        self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]
    ) -> None:
        """Record an operator that has just run, with the host views of what it made anew."""
        assert self._graph is not None
        self._graph.add(operator, args, kwargs, made)

    def refuse(self, what: str) -> None:
        """RuntimeError if this thread is being recorded: `what` cannot be part of a graph."""
        if self.active:
            raise RuntimeError(f"{what} is not permitted while toy:0 captures a graph")
