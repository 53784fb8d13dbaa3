"""The start-up ledger: the phases of a process's start, how long they took, and why a slow one was slow.

    phases = Phases()
    with phases.run("weights", predicted=(0.2, "100 MiB at 500 MiB/s")):
        ...                       # a phase in a phase is counted in both
    phases.done ──► Ready, /get_server_info, the log

A cause is named from what the operating system counts for this process: bytes that came from storage, pages that came
from swap, and processor time. This module must not know what is started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SLOW_S = 1.0  # shorter phases need no cause
SLOW_FACTOR = 2.0  # a predicted phase is slow if it takes longer by this factor
ANYTHING = "the device, for a lock, or for processors that others used"
_MIB = 2**20
_MOST_OF = 0.5  # of the time of a phase
_COLD = 16 * _MIB  # bytes from storage that are worth a sentence
_SAMPLE = 8 * _MIB  # bytes that are read to measure a bandwidth


class Phase(NamedTuple):
    """One phase. `predicted` seconds, with their `basis`; None: no claim. `cause`: why it was slow, if it was."""

    name: str
    seconds: float
    predicted: float | None = None
    basis: str = ""
    cause: str = ""

    def __str__(self) -> str:
        predicted = "" if self.predicted is None else f", {self.predicted:.2f} s predicted ({self.basis})"
        return f"{self.name}: {self.seconds:.2f} s{predicted}{f'; slow: {self.cause}' if self.cause else ''}"

    def to_dict(self) -> dict[str, object]:
        """JSON-compatible values, in seconds."""
        predicted = None if self.predicted is None else round(self.predicted, 3)
        return {**self._asdict(), "seconds": round(self.seconds, 3), "predicted": predicted}


class ProcessUse(NamedTuple):
    """What the operating system has counted for this process so far. None: it does not say.

    processor: seconds, of all threads. stored: bytes that came from storage. swapped: bytes that are in swap now.
    """

    processor: float
    stored: int | None = None
    swapped: int | None = None

    @classmethod
    def now(cls) -> ProcessUse:
        status = _fields("/proc/self/status").get("VmSwap")
        return cls(
            time.process_time(),
            _fields("/proc/self/io").get("read_bytes"),
            None if status is None else status * 1024,
        )


class Phases:
    """Records the phases of this process. `usage`: what is counted; replaced in tests."""

    def __init__(self, usage: Callable[[], ProcessUse] = ProcessUse.now) -> None:
        self._usage = usage
        self._done: list[Phase] = []

    @property
    def done(self) -> tuple[Phase, ...]:
        """In the order in which they ended."""
        return tuple(self._done)

    def add(self, phases: Sequence[Phase]) -> None:
        """Phases that were recorded elsewhere."""
        self._done += phases

    @contextmanager
    def run(
        self, name: str, predicted: tuple[float, str] | None = None, does: str = "computing", waits_for: str = ANYTHING
    ) -> Iterator[None]:
        """Record what runs inside. `predicted`: seconds and their basis.

        `does`: what takes its processor time; `waits_for`: what it waits for. A phase that raises is recorded, too.
        """
        before, begin = self._usage(), time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            expected, basis = (None, "") if predicted is None else predicted
            slow = seconds >= max(SLOW_S, SLOW_FACTOR * (expected or 0.0))
            cause = why_slow(seconds, before, self._usage(), does, waits_for) if slow else ""
            self._done.append(Phase(name, seconds, expected, basis, cause))


def why_slow(seconds: float, before: ProcessUse, after: ProcessUse, does: str, waits_for: str = ANYTHING) -> str:
    """The cause of a phase that took so long, from what was counted before and after it."""
    causes = []
    processor = after.processor - before.processor
    swapped = (after.swapped or 0) - (before.swapped or 0)
    stored = (after.stored or 0) - (before.stored or 0)
    waited = seconds - processor
    if swapped >= _MIB:
        causes.append(f"{swapped // _MIB} MiB of this process were moved to swap")
    if stored >= _COLD and waited >= _MOST_OF * seconds:
        rate = stored / seconds / _MIB
        causes.append(f"the page cache was cold: {stored // _MIB} MiB came from storage, {rate:.0f} MiB/s")
    if processor >= _MOST_OF * seconds:
        causes.append(f"{does}: {processor:.1f} s of processor time")
    if not causes:
        causes.append(f"it waited {waited:.1f} s for {waits_for}")
    return "; ".join(causes)


def read_seconds(paths: Sequence[Path], size: int) -> tuple[float, str] | None:
    """The seconds to read `size` bytes of these files, at the bandwidth of a sample of the largest one; and the basis.

    None if none of them can be sampled. What is done with the bytes afterwards is not predicted.
    """
    try:
        largest = max(paths, key=lambda path: path.stat().st_size)
        with largest.open("rb", buffering=0) as file:
            file.seek(max(0, (largest.stat().st_size - _SAMPLE) // 2))
            begin = time.perf_counter()
            sample = len(file.read(_SAMPLE))
            seconds = time.perf_counter() - begin
    except (OSError, ValueError):
        return None
    if sample < _MIB or seconds <= 0:
        return None
    rate = sample / seconds
    return size / rate, f"{size / _MIB:.0f} MiB at {rate / _MIB:.0f} MiB/s, as a sample of {largest.name} was read"


def since_process_start() -> float | None:
    """Seconds since this process was started, before its interpreter; None if the system does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _fields(path: str) -> dict[str, int]:
    """The integers of a file with lines such as "VmSwap:  0 kB"; {} without the file, as outside Linux."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            lines = [line.split(":", 1) for line in file if ":" in line]
    except OSError:
        return {}
    return {name: int(words[0]) for name, rest in lines if (words := rest.split()) and words[0].isdigit()}
