"""Records what a rank computes, with torch's profiler: the operators, and the kernels of every device it supports.

A trace is a gzipped JSON file in Chrome's trace format, which https://ui.perfetto.dev opens. The profiler has to be
started and stopped on the thread that runs the steps.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from srv.commands import Answer, StartProfile, StopProfile


class RankProfiler:
    """The profiler of one rank; at most one recording at a time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._recording: tuple[torch.profiler.profile, Path] | None = None

    def run(self, command: StartProfile | StopProfile) -> Answer:
        match command:
            case StartProfile(folder):
                return self._start(Path(folder))
            case StopProfile():
                return self._stop()

    def _start(self, folder: Path) -> Answer:
        if self._recording is not None:
            return Answer(error="a profile is being recorded already; stop it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            return Answer(error=f"the engine cannot write to {folder}")
        profile = new_profile()
        profile.start()
        self._recording = profile, folder
        return Answer()

    def _stop(self) -> Answer:
        if self._recording is None:
            return Answer(error="no profile is being recorded")
        (profile, folder), self._recording = self._recording, None
        profile.stop()
        return Answer([str(write_trace(profile, folder, f"rank-{self._rank}"))])


def new_profile() -> torch.profiler.profile:
    """A recording of everything that torch can record here, not started."""
    return torch.profiler.profile(activities=torch.profiler.supported_activities())  # type: ignore[no-untyped-call]


def write_trace(profile: torch.profiler.profile, folder: Path, name: str) -> Path:
    """Write a stopped recording to a new file in `folder`; returns its path."""
    file = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{name}.trace.json.gz"
    profile.export_chrome_trace(str(file))
    return file
