"""What a process that started another learns of its state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from srv.io import child


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.wait()


def test_a_stopped_process_is_told_from_one_that_runs(process: subprocess.Popen[bytes]) -> None:
    assert not child.is_stopped(process)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert [child.is_stopped(process), child.is_stopped(process)] == [True, True]  # as often as it is asked
    assert child.exit_status(process) is None


def test_a_process_that_has_ended_is_not_stopped(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has taken its exit status
    assert not child.is_stopped(process)
    assert child.exit_status(process) == f"signal {signal.SIGKILL}"
    assert not child.is_stopped(process)  # nobody's child any more
