"""Intercept every call of the native library, with its arguments, to count and profile the kernels of a step.

    with KernelCalls() as calls:      enter before an engine is built, because an engine caches the functions
        ... build it ...
        calls.on_call = ...           called with every kernel call from now on; a replayed graph reports all its calls

Owns the wrapping of the library's functions while it is entered. Must not know what an engine does with them.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from srv_kernels.cpu import library

# Kernels that take their arguments as a pointer to a structure (srv_w8a8_linear: W8a8LinearArgs), by the kernel's name.
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "srv" + re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", args.__name__.removesuffix("Args")): args
    for args in library._ARGS
}
GRAPH_RUN = "srv_graph_replay"
_NO_KERNELS = ("srv_set_threads", "srv_shared_abort", GRAPH_RUN, "srv_graph_free")


@dataclass(frozen=True)
class KernelCall:
    """One call. `arguments`: as they were passed, or the type and a copy of the structure of arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def argument(self, which: int | str) -> Any:
        """An argument by its position, or by its name in the structure."""
        return getattr(self.arguments[1], which) if isinstance(which, str) else self.arguments[which]

    def repeat(self) -> None:
        """Call the kernel again; the memory that its arguments point to must still be valid."""
        self.function(
            *(
                ctypes.byref(argument) if isinstance(argument, ctypes.Structure) else argument
                for argument in self.arguments
            )
        )


class KernelCalls:
    """Passes each call to `on_call` before it is made, on the calling thread, and all calls of a graph before a replay.

    Use one at a time. Raises RuntimeError if the library is not available.
    """

    def __init__(self) -> None:
        loaded = library.load()
        if loaded.library is None:
            raise RuntimeError(f"native kernels are not available: {loaded.reason}")
        self.on_call: Callable[[KernelCall], None] | None = None
        self.spent: Counter[str] = Counter()  # seconds by function, with each replay as one; the caller clears it
        self._library = loaded.library
        self._originals: dict[str, Any] = {}
        self._graphs: dict[int, list[KernelCall]] = {}
        self._capturing: list[KernelCall] | None = None

    def __enter__(self) -> KernelCalls:
        wrapped = {name: partial(self._call, name) for name in library._SIGNATURES if name not in _NO_KERNELS}
        wrapped |= {"srv_graph_capture_begin": self._begin, "srv_graph_capture_end": self._end, GRAPH_RUN: self._replay}
        for name, function in wrapped.items():
            self._originals[name] = getattr(self._library, name)
            setattr(self._library, name, function)
        return self

    def __exit__(self, *raised: object) -> None:
        for name, function in self._originals.items():
            setattr(self._library, name, function)

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.on_call is not None or self._capturing is not None:
            call = KernelCall(name, self._originals[name], _copied(name, arguments))
            self._report([call])
            if self._capturing is not None:
                self._capturing.append(call)
        return self._timed(name, *arguments)

    def time_alone(self, calls: Sequence[KernelCall], times: int) -> float:
        """Median seconds of these calls, replayed one after the other from C++ without the calls between them."""
        graph = self._originals["srv_graph_capture_begin"]()
        for call in calls:
            call.repeat()
        self._originals["srv_graph_capture_end"]()
        run, spent = self._originals[GRAPH_RUN], []
        for _ in range(times):
            start = perf_counter()
            run(graph)
            spent.append(perf_counter() - start)
        self._library.srv_graph_free(graph)
        return median(spent)

    def _timed(self, name: str, *arguments: Any) -> Any:
        start = perf_counter()
        try:
            return self._originals[name](*arguments)
        finally:
            self.spent[name] += perf_counter() - start

    def _report(self, calls: Sequence[KernelCall]) -> None:
        if self.on_call is not None:
            for call in calls:
                self.on_call(call)

    def _begin(self) -> int | None:
        graph: int | None = self._originals["srv_graph_capture_begin"]()
        if graph is not None:
            self._capturing = self._graphs[graph] = []
        return graph

    def _end(self) -> int:
        self._capturing = None
        return int(self._originals["srv_graph_capture_end"]())

    def _replay(self, graph: int) -> None:
        self._report(self._graphs[graph])
        self._timed(GRAPH_RUN, graph)


def _copied(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with a copy of their structure, because the caller may change it."""
    if tuple(library._SIGNATURES[name]) != (ctypes.c_int32, ctypes.c_void_p):
        return arguments
    kind, pointer = arguments
    address = pointer if isinstance(pointer, int) else ctypes.addressof(pointer._obj)
    structure = STRUCTURES[name]
    return kind, structure.from_buffer_copy(structure.from_address(address))
