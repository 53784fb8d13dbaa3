"""A real `srv launch` in separate processes, on a free loopback port, which ends with its check."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srv.args.config import ARGUMENTS

START_SECONDS = 180.0
ANSWER_SECONDS = 60.0
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.1
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Exited:
    """A launch that exited by itself: its status and its output."""

    status: int
    output: str

    @property
    def last_line(self) -> str:
        lines = [line for line in self.output.strip().splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it printed nothing"


class NotServing(Exception):
    """The server is not usable. The message is a clause."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    port: int
    api_key: str

    def request(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of one request: POST with a body, else GET."""
        connection = http.client.HTTPConnection(_LOOPBACK, self.port, timeout=ANSWER_SECONDS)
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            text = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, text, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        return response.status, json.loads(data) if data else None


@contextmanager
def running_server(arguments: Sequence[str], folder: Path, api_key: str = "") -> Iterator[Server]:
    """`srv launch` with these arguments, once it is healthy. Raises NotServing if it does not start."""
    port = _free_port()
    log = folder / f"server-{port}.log"
    with log.open("wb") as output:
        process = _start([*arguments, "--host", _LOOPBACK, "--port", str(port)], output)
    try:
        server = Server(port, api_key)
        _wait_healthy(server, process, log)
        yield server
    finally:
        _stop(process)


def wait_for_exit(arguments: Sequence[str], folder: Path) -> Exited:
    """Run `srv launch` with these arguments until it exits by itself. Raises NotServing if it does not."""
    log = folder / "refused.log"
    with log.open("wb") as output:
        process = _start([*arguments, "--host", _LOOPBACK, "--port", str(_free_port())], output)
    try:
        status = process.wait(START_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotServing(f"it did not exit within {START_SECONDS:g} s") from error
    finally:
        _stop(process)
    return Exited(status, log.read_text(errors="replace"))


def _start(arguments: Sequence[str], output: Any) -> subprocess.Popen[bytes]:
    """Start it with this process's import path, and without the environment variables that set arguments."""
    variables = {argument.variable for argument in ARGUMENTS.values()}
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "srv", "launch", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
    )


def _wait_healthy(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            exited = Exited(process.returncode, log.read_text(errors="replace"))
            raise NotServing(f"it exited with status {exited.status}: {exited.last_line}")
        with suppress(OSError, http.client.HTTPException, ValueError):
            if server.request("/health")[0] == http.client.OK:
                return
        time.sleep(_POLL_SECONDS)
    raise NotServing(f"it was not healthy after {START_SECONDS:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate it, and kill it if it does not exit. Its engine ends with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    if process.poll() is None:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
