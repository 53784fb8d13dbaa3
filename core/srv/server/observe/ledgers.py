"""The memory ledger and the start-up ledger, as `/get_server_info` shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import msgspec

from srv.io.memory_lines import ACTIVATIONS, MemoryLine
from srv.io.phases import Phase


def memory_report(ranks: Sequence[Sequence[MemoryLine]], peaks: Sequence[int | None]) -> list[dict[str, object]]:
    """The lines of each rank. `peaks`: what the steps of each have needed at most so far, in bytes."""
    return [
        {"process": f"rank {number}", "lines": [_with_peak(line, peak).to_dict() for line in lines]}
        for number, (lines, peak) in enumerate(zip_longest(ranks, peaks[: len(ranks)]))
    ]


def _with_peak(line: MemoryLine, peak: int | None) -> MemoryLine:
    if line.name != ACTIVATIONS or peak is None:
        return line
    return msgspec.structs.replace(line, measured=peak, note="the peak of all steps so far")


def startup_report(processes: Mapping[str, Sequence[Phase]]) -> list[dict[str, object]]:
    """The phases of each process, in seconds."""
    return [{"process": name, "phases": [phase.to_dict() for phase in phases]} for name, phases in processes.items()]
