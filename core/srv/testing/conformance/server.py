"""A real `srv launch`: processes of its own, a free port of the loopback interface, ended with its check."""

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
END_SECONDS = 20.0
_POLL_SECONDS = 0.1
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ended:
    """A launch that ended by itself: its status and what it wrote."""

    status: int
    text: str

    @property
    def last_line(self) -> str:
        lines = [line for line in self.text.strip().splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it wrote nothing"


class NotServing(Exception):
    """The server did not come up; says why, as a clause."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    port: int
    api_key: str

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
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
def serving(line: Sequence[str], folder: Path, api_key: str = "") -> Iterator[Server]:
    """`srv launch` with these words, once it is healthy. NotServing if it does not come up."""
    port = _free_port()
    log = folder / f"server-{port}.log"
    with log.open("wb") as output:
        process = _start([*line, "--host", _LOOPBACK, "--port", str(port)], output)
    try:
        server = Server(port, api_key)
        _wait_healthy(server, process, log)
        yield server
    finally:
        _end(process)


def refused(line: Sequence[str], folder: Path) -> Ended:
    """What `srv launch` with these words says, which is to end by itself. NotServing if it does not."""
    log = folder / "refused.log"
    with log.open("wb") as output:
        process = _start([*line, "--host", _LOOPBACK, "--port", str(_free_port())], output)
    try:
        status = process.wait(START_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotServing(f"it did not end within {START_SECONDS:g} s") from error
    finally:
        _end(process)
    return Ended(status, log.read_text(errors="replace"))


def _start(line: Sequence[str], output: Any) -> subprocess.Popen[bytes]:
    """In a session of its own, without arguments from this environment, and with this process's import path."""
    variables = {argument.variable for argument in ARGUMENTS.values()}
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "srv", "launch", *line],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
    )


def _wait_healthy(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            ended = Ended(process.returncode, log.read_text(errors="replace"))
            raise NotServing(f"it ended with status {ended.status}: {ended.last_line}")
        with suppress(OSError, http.client.HTTPException, ValueError):
            if server.ask("/health")[0] == http.client.OK:
                return
        time.sleep(_POLL_SECONDS)
    raise NotServing(f"it was not healthy after {START_SECONDS:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it. Its engine ends with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    if process.poll() is None:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
