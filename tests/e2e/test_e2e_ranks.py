"""A server whose model is sharded over ranks: it serves, and whatever ends it leaves no process and no socket."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from e2e_support import STOP_S, Server, gone, greedy, launched, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ARGUMENTS = ("--device", "cpu", "--max-total-tokens", "4096", "--max-running-requests", "2", "--tp-size", "3")
LIMIT_S = 60.0  # for the end of an engine that has lost a rank: a hang, not the speed of this machine


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The temporary directory of the server; its path is short enough for sockets."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def ranks(server: Server) -> list[int]:
    """The process ids of the ranks, in order."""
    children = psutil.Process(server.engine_pid()).children()
    return [child.pid for child in sorted(children, key=lambda child: child.create_time())]


def assert_nothing_left(temporary: Path, processes: list[int]) -> None:
    wait_until(lambda: all(map(gone, processes)), STOP_S, "all processes are gone")
    wait_until(lambda: not list(temporary.glob("srv-*")), STOP_S, "the sockets are gone")


def test_a_killed_rank_is_named_and_ends_the_server(tmp_path: Path, temporary: Path) -> None:
    with launched(tmp_path / "log", *ARGUMENTS, environment={"TMPDIR": str(temporary)}) as server:
        answer = server.generate(**greedy("The capital of France is", 8))
        assert answer["meta_info"]["completion_tokens"] == 8
        pids = ranks(server)
        assert len(pids) == 3
        processes = [server.engine_pid(), *pids]
        assert ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in processes] == [False, True, True, True]
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        assert server.wait() == 1, server.log_text()
        assert time.monotonic() - started < LIMIT_S
        assert f"rank 1 (process {pids[1]}) ended with signal 9" in server.log_text()
        assert "Traceback" not in server.log_text()
        assert_nothing_left(temporary, processes)


@pytest.mark.parametrize("victim", ["engine", "server"])
def test_ranks_end_when_their_parents_are_killed(victim: str, tmp_path: Path, temporary: Path) -> None:
    with launched(tmp_path / "log", *ARGUMENTS, environment={"TMPDIR": str(temporary)}) as server:
        processes = [server.engine_pid(), *ranks(server)]
        os.kill(processes[0] if victim == "engine" else server.pid, signal.SIGKILL)
        assert_nothing_left(temporary, processes)
        server.wait()


def test_a_stopped_server_stops_its_ranks(tmp_path: Path, temporary: Path) -> None:
    with launched(tmp_path / "log", *ARGUMENTS, environment={"TMPDIR": str(temporary)}) as server:
        processes = [server.engine_pid(), *ranks(server)]
        server.terminate()
        assert server.wait() == 0, server.log_text()
        assert "Traceback" not in server.log_text()
        assert_nothing_left(temporary, processes)
