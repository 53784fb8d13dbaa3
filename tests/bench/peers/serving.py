"""One server process of the benchmark: start it on a free loopback port, measure its memory, end it with its children.

Owns the processes and their log. Must not know the requests.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import urlopen

import psutil
from catalogue import THREADS, Peer
from machine import cores

START_S = 400.0  # vLLM compiles when it starts for the first time
STOP_S = 30.0


class ServerFailed(Exception):
    """A server did not start, or ended; the message has the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment_of(peer: Peer) -> dict[str, str]:
    """This process's environment without variables that would change a server, and with those of the peer."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SRV_", "OMP_", "VLLM_"))}
    return {**inherited, **peer.environment}


class Serving:
    """A context in which `peer` serves on `port`. Its processes get as many cores as each has threads.

    `start_s`: seconds from the process's start until it was healthy.
    """

    def __init__(self, peer: Peer, log: Path) -> None:
        self.peer = peer
        self.port = free_port()
        self.start_s = 0.0
        self._started = 0.0
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Serving:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.perf_counter()
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    self.peer.command(self.port),
                    env=environment_of(self.peer),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerFailed(f"it cannot be started: {error}") from error
        os.sched_setaffinity(self._process.pid, cores(THREADS))
        try:
            self._wait_healthy()
        except BaseException:
            self._stop()
            raise
        self.start_s = self.age_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._started

    def pss_bytes(self) -> int:
        """Proportional set size of the process and all its children (shared pages are divided among their users)."""
        assert self._process is not None
        total = 0
        root = psutil.Process(self._process.pid)
        for process in (root, *root.children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue  # it has ended since it was listed
        return total

    def _wait_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if (status := self._process.poll()) is not None:
                raise ServerFailed(f"it ended with status {status} when it started: {self.log_end()}")
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.1)
        raise ServerFailed(f"it was not healthy within {START_S:g} s: {self.log_end()}")

    def log_end(self) -> str:
        """The last lines of the server's log, without lines that only underline."""
        lines = self._log.read_text(errors="replace").splitlines()
        printed = [line.strip() for line in lines if line.strip(" ^~")]
        return " / ".join(printed[-3:])[-400:]

    def _stop(self) -> None:
        assert self._process is not None
        children: list[psutil.Process] = []
        if self._process.poll() is None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        _, left = psutil.wait_procs(children, timeout=5)
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ProcessLookupError):  # children of a server that ended before they were listed
            os.killpg(self._process.pid, signal.SIGKILL)
