"""Every call of the native library, with its arguments, seen from outside: for counts and profiles of a step.

    with KernelCalls() as calls:      before an engine is built: it keeps the functions that it finds
        ... build it ...
        calls.see = ...               is called with every call from now on; a tape that runs is the calls on it

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

# Kernels whose arguments lie in a structure, at the address that they are given second: srv_byte_linear's, for one, in
# ByteLinearArgs.
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "srv" + re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", args.__name__.removesuffix("Args")): args
    for args in library._ARGS
}
TAPE_RUN = "srv_tape_run"
_NO_KERNELS = ("srv_set_threads", TAPE_RUN, "srv_tape_free")


@dataclass(frozen=True)
class KernelCall:
    """One call, as it was: `given` are its arguments, or the type and a copy of its structure."""

    name: str
    function: Callable[..., Any]
    given: tuple[Any, ...]

    def argument(self, which: int | str) -> Any:
        """By its place, or by its name in the structure."""
        return getattr(self.given[1], which) if isinstance(which, str) else self.given[which]

    def again(self) -> None:
        """The same once more; what the addresses point to must still be there."""
        self.function(*(ctypes.byref(each) if isinstance(each, ctypes.Structure) else each for each in self.given))


class KernelCalls:
    """Shows each call to `see` before it is made, on the thread that makes it, and all of a tape before that runs.

    Use one at a time. Raises RuntimeError where there is no library.
    """

    def __init__(self) -> None:
        loaded = library.load()
        if loaded.library is None:
            raise RuntimeError(f"there are no native kernels to watch: {loaded.reason}")
        self.see: Callable[[KernelCall], None] | None = None
        self.spent: Counter[str] = Counter()  # seconds by function, tapes as such; the caller clears it
        self._library = loaded.library
        self._originals: dict[str, Any] = {}
        self._tapes: dict[int, list[KernelCall]] = {}
        self._recording: list[KernelCall] | None = None

    def __enter__(self) -> KernelCalls:
        wrapped = {name: partial(self._call, name) for name in library._SIGNATURES if name not in _NO_KERNELS}
        wrapped |= {f"srv_tape_{part}": getattr(self, f"_tape_{part}") for part in ("begin", "end", "run")}
        for name, function in wrapped.items():
            self._originals[name] = getattr(self._library, name)
            setattr(self._library, name, function)
        return self

    def __exit__(self, *raised: object) -> None:
        for name, function in self._originals.items():
            setattr(self._library, name, function)

    def _call(self, name: str, *given: Any) -> Any:
        if self.see is not None or self._recording is not None:
            call = KernelCall(name, self._originals[name], _kept(name, given))
            self._show([call])
            if self._recording is not None:
                self._recording.append(call)
        return self._timed(name, *given)

    def alone(self, calls: Sequence[KernelCall], times: int) -> float:
        """Median seconds of these calls one after the other from C++, without what was between them."""
        tape = self._originals["srv_tape_begin"]()
        for call in calls:
            call.again()
        self._originals["srv_tape_end"]()
        run, spent = self._originals[TAPE_RUN], []
        for _ in range(times):
            begun = perf_counter()
            run(tape)
            spent.append(perf_counter() - begun)
        self._library.srv_tape_free(tape)
        return median(spent)

    def _timed(self, name: str, *given: Any) -> Any:
        begun = perf_counter()
        try:
            return self._originals[name](*given)
        finally:
            self.spent[name] += perf_counter() - begun

    def _show(self, calls: Sequence[KernelCall]) -> None:
        if self.see is not None:
            for call in calls:
                self.see(call)

    def _tape_begin(self) -> int | None:
        tape: int | None = self._originals["srv_tape_begin"]()
        if tape is not None:
            self._recording = self._tapes[tape] = []
        return tape

    def _tape_end(self) -> int:
        self._recording = None
        return int(self._originals["srv_tape_end"]())

    def _tape_run(self, tape: int) -> None:
        self._show(self._tapes[tape])
        self._timed(TAPE_RUN, tape)


def _kept(name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that stay as they are when the caller's structure changes."""
    pointer = ctypes.c_void_p
    if tuple(library._SIGNATURES[name]) != (ctypes.c_int32, pointer):
        return given
    kind, place = given
    address = place if isinstance(place, int) else ctypes.addressof(place._obj)
    structure = STRUCTURES[name]
    return kind, structure.from_buffer_copy(structure.from_address(address))
