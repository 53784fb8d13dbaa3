"""A real server process for tests, started on a free loopback port and ended by its process id.

Owns the process and its log. Must not know what any test asserts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

STOP_S = 45.0
REQUEST_S = 120.0
POLL_S = 0.1
# An idle machine takes four seconds; a busy one and simulated devices, which capture graphs, take much longer.
START_S = 280.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment() -> dict[str, str]:
    """The caller's environment without its SRV_ variables, except those that select a simulated device."""
    simulated = {name: value for name, value in os.environ.items() if name.endswith("_SIMULATOR")}
    return {name: value for name, value in os.environ.items() if not name.startswith("SRV_")} | simulated


# A program that ignores SIGHUP, as nohup makes it, passes that on to what it starts. This starts a command with the
# default, in the same process.
_HEARING = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
HEARING_SIGHUP = (sys.executable, "-S", "-c", _HEARING)
MODULE = (sys.executable, "-m", "srv")
SCRIPT = (str(Path(sys.executable).parent / "srv"),)


def srv_command(*arguments: str) -> list[str]:
    return [*MODULE, *arguments]


def launch(*arguments: str) -> tuple[int, str, float]:
    """(exit status, standard error, seconds) of an `srv launch` that must end by itself."""
    started = time.monotonic()
    process = subprocess.run(
        srv_command("launch", *arguments),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=clean_environment(),
    )
    assert "Traceback" not in process.stderr, process.stderr
    return process.returncode, process.stderr, time.monotonic() - started


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not true after {seconds:g} s: {what}")
        time.sleep(POLL_S)


def gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not waited for it yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@dataclass
class Server:
    """One `srv launch` process. `arguments`: without the port. `environment`: in addition to the caller's variables."""

    arguments: Sequence[str]
    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = MODULE

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    # ---- lifecycle

    def start(self) -> None:
        """Start, and wait until /health returns 200. Raises RuntimeError with the end of the log if it does not."""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*HEARING_SIGHUP, *self.program, "launch", "--port", str(self.port), *self.arguments],
                stdout=log,
                stderr=log,
                env={**clean_environment(), **self.environment},
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if (status := self.process.poll()) is not None:
                raise RuntimeError(f"the server ended with status {status}:\n{self.log_text()[-4000:]}")
            if self.health() == 200:
                return
            time.sleep(POLL_S)
        self.kill()
        raise RuntimeError(f"the server was not healthy after {START_S:g} s:\n{self.log_text()[-4000:]}")

    def health(self) -> int | None:
        """The status of /health; None if there is no answer."""
        try:
            return httpx.get(f"{self.base}/health", timeout=5).status_code
        except httpx.TransportError:
            return None

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = STOP_S) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def stop(self) -> int:
        """Send SIGTERM and return the exit status. A process that does not end in time is killed; TimeoutExpired."""
        assert self.process is not None
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill all processes, engine first (which would also end by itself when its parent is gone)."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait(STOP_S)

    def children(self, module: str) -> list[int]:
        """Process ids of the server's children whose command names this module."""
        pids = []
        for child in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in " ".join(child.cmdline()):
                    pids.append(child.pid)
        return pids

    def engines(self) -> list[int]:
        """Process ids of the engines among the server's children; a probe may be another child."""
        return self.children("srv.engine.process")

    def engine_pid(self) -> int:
        """Process id of the engine, the server's child."""
        (pid,) = self.engines()
        return pid

    # ---- requests

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=REQUEST_S, **more)

    def asynchronous(self, **more: Any) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.base, timeout=REQUEST_S, limits=limits, **more)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    def generate(self, **body: Any) -> Any:
        """The response of /generate, which must be successful."""
        response = self.post("/generate", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def model(self) -> str:
        return str(self.get("/v1/models").json()["data"][0]["id"])

    def flush(self) -> None:
        """Clear the prefix cache, so that the next request computes its whole prompt."""
        response = self.post("/flush_cache")
        assert response.status_code == 200, response.text

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by its name with labels."""
        samples = [line.rpartition(" ") for line in self.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in samples if name}

    def wait_pages_back(self, seconds: float = 30) -> dict[str, float]:
        """Wait until no request runs, waits or holds a page; returns the metrics. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.metrics()
            left = {name: shown[name] for name in BUSY}
            if not any(left.values()):
                return shown
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {seconds:g} s the engine still has {left}")
            time.sleep(POLL_S)


BUSY = ("srv_requests_running", "srv_requests_queued", "srv_kv_pages_held")


@contextlib.contextmanager
def launched(log: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A healthy server, which is killed at the end if it still runs."""
    server = Server(arguments, log, environment=environment or {})
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


@contextlib.contextmanager
def served(log: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A healthy server, which must end with status 0 after SIGTERM and leave no engine process."""
    with launched(log, *arguments, environment=environment) as server:
        engine = server.engine_pid()
        yield server
        assert server.stop() == 0, server.log_text()[-4000:]
        assert gone(engine)


# ---- streams


def read_events(lines: Sequence[str]) -> list[Any]:
    """JSON payloads of the server-sent events in `lines`; the end marker is the string [DONE]."""
    payloads = [line.removeprefix("data: ") for line in lines if line]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """The events of a streamed response, as they arrive."""
    async for line in response.aiter_lines():
        for event in read_events([line]):
            yield event


def greedy(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A body for /generate: `tokens` greedy tokens, also after the end-of-sequence token."""
    return {
        "text": prompt,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        **more,
    }


async def stream_ids(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """Token ids of a streamed /generate, which must end with [DONE]."""
    async with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        shown = [event async for event in events(response)]
    assert shown[-1] == "[DONE]", shown[-1]
    ids: list[int] = shown[-2]["output_ids"]
    return ids


async def leave_after(client: httpx.AsyncClient, body: dict[str, Any], count: int) -> int:
    """Read `count` events of a streamed /generate, then disconnect; returns the number of events."""
    seen = 0
    async with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        async for _ in events(response):
            seen += 1
            if seen >= count:
                break
    return seen


NOUNS = ("river", "stone", "window", "garden", "paper", "winter", "yellow", "mother", "train", "silver", "forest")


def prompts(count: int, nouns: int, seed: int) -> list[str]:
    """Different prompts, the same for the same seed."""
    draw = random.Random(seed)
    return [f"Story {index}: " + " ".join(draw.choices(NOUNS, k=nouns)) for index in range(count)]
