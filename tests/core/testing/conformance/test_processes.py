"""The time that a check may take: a busy machine ends none, and one that hangs is ended."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from srv.testing.conformance import processes
from srv.testing.conformance.processes import Allowance, _Spawned


def test_waiting_for_a_processor_costs_the_time_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = [0.0], [0.0]
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    allowance = Allowance(10.0, lambda: used[0])
    for _ in range(20):  # of a processor it gets a tenth
        clock[0] += 1.0
        used[0] += 0.1
        left = allowance.left()
    assert left == pytest.approx(8.0)
    clock[0] += 7.0  # it sleeps
    assert allowance.left() == pytest.approx(1.0)
    clock[0] += 2.0
    used[0] += 2.0
    assert allowance.left() == pytest.approx(-1.0)


def test_the_processor_time_of_a_process_is_its_own() -> None:
    spins = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    sleeps = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        until = time.monotonic() + 30
        while _Spawned(spins).processor_seconds() < 0.5 and time.monotonic() < until:
            time.sleep(0.05)
        assert _Spawned(spins).processor_seconds() >= 0.5
        assert _Spawned(sleeps).processor_seconds() < 0.4
    finally:
        for process in (spins, sleeps):
            process.kill()
            process.wait()
    assert _Spawned(spins).processor_seconds() == 0.0
