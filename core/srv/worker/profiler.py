"""Records what a rank computes, with torch's profiler: the operators, and the kernels of every device it supports.

A trace is a gzipped JSON file in Chrome's trace format, which https://ui.perfetto.dev opens. The profiler has to be
started and stopped on the thread that runs the steps.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from srv.commands import Answer, Command, StartProfile, StopProfile


class RankProfiler:
    """The profiler of one rank; at most one recording at a time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._recording: tuple[torch.profiler.profile, Path] | None = None

    def run(self, command: Command) -> Answer:
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
        profile = torch.profiler.profile(activities=torch.profiler.supported_activities())  # type: ignore[no-untyped-call]
        profile.start()
        self._recording = profile, folder
        return Answer()

    def _stop(self) -> Answer:
        if self._recording is None:
            return Answer(error="no profile is being recorded")
        (profile, folder), self._recording = self._recording, None
        profile.stop()
        file = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank-{self._rank}.trace.json.gz"
        profile.export_chrome_trace(str(file))
        return Answer([str(file)])
