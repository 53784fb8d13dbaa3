"""How the server ends: stopped, its engine killed, or the server itself killed. Clients get an error.

No process is left.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from e2e_support import (
    HEARING_SIGHUP,
    REQUEST_S,
    SCRIPT,
    START_S,
    STOP_S,
    Server,
    clean_environment,
    gone,
    greedy,
    launched,
    read_events,
    srv_command,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ARGUMENTS = ("--device", "cpu", "--max-total-tokens", "16384")
RESULT_S = 30.0  # for a client to get the result of its request


class Client(threading.Thread):
    """Sends one /generate and collects the response; `started` is set by the first event of a stream."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.started = threading.Event()
        self.status = 0
        self._server, self._body = server, body
        self._lines: queue.Queue[str] = queue.Queue()
        self.failure: httpx.HTTPError | None = None

    def run(self) -> None:
        try:
            url = f"{self._server.base}/generate"
            with httpx.stream("POST", url, json=self._body, timeout=REQUEST_S) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self._lines.put(line)
                    self.started.set()
        except httpx.HTTPError as error:
            self.failure = error

    def answer(self) -> list[Any]:
        """All events, when the response has ended without an error."""
        self.join(RESULT_S)
        assert not self.is_alive(), "the client still waits"
        assert self.failure is None, self.failure
        lines = [self._lines.get_nowait() for _ in range(self._lines.qsize())]
        return read_events(lines)


def running(server: Server, *bodies: dict[str, Any]) -> list[Client]:
    """Start clients, and wait until all their requests run."""
    clients = [Client(server, body) for body in bodies]
    for client in clients:
        client.start()
    wait_until(lambda: server.metrics()["srv_requests_running"] == len(bodies), 60, "all requests run")
    for client, body in zip(clients, bodies, strict=True):
        assert not body.get("stream") or client.started.wait(RESULT_S)
    return clients


def assert_nothing_left(server: Server, engine: int) -> None:
    wait_until(lambda: gone(engine), STOP_S, "the engine process is gone")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))
        probe.listen()


def test_after_sigterm_running_requests_finish_and_new_ones_are_refused(tmp_path: Path) -> None:
    with launched(tmp_path / "log", *ARGUMENTS) as server:
        engine = server.engine_pid()
        stream, whole = running(server, greedy("A stream", 150, stream=True), greedy("Not streamed", 150))
        server.terminate()
        wait_until(lambda: server.health() == 503, RESULT_S, "/health says that the server is stopping")
        refused = server.post("/generate", **greedy("Too late", 1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) > 0
        *shown, end = stream.answer()
        assert end == "[DONE]"
        assert shown[-1]["meta_info"]["completion_tokens"] == 150
        assert shown[-1]["meta_info"]["finish_reason"]["type"] == "length"
        (answer,) = whole.answer()
        assert whole.status == 200
        assert answer["meta_info"]["completion_tokens"] == 150
        assert server.wait() == 0, server.log_text()
        assert_nothing_left(server, engine)


def test_after_the_grace_period_running_requests_are_aborted(tmp_path: Path) -> None:
    with launched(tmp_path / "log", *ARGUMENTS, "--graceful-shutdown-seconds", "0.3") as server:
        engine = server.engine_pid()
        stream, whole = running(server, greedy("A stream", 6000, stream=True), greedy("Not streamed", 6000))
        server.terminate()
        *_, cut, last = stream.answer()
        assert cut["meta_info"]["finish_reason"] == {"type": "abort", "message": "the server is shutting down"}
        assert last["error"]["code"] == "shutting_down"
        (answer,) = whole.answer()
        assert whole.status == 200
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.wait() == 0, server.log_text()
        assert_nothing_left(server, engine)
        assert "Traceback" not in server.log_text()


def test_if_the_engine_is_killed_clients_get_an_error_and_the_server_ends(tmp_path: Path) -> None:
    with launched(tmp_path / "log", *ARGUMENTS) as server:
        stream, whole = running(server, greedy("A stream", 6000, stream=True), greedy("Not streamed", 6000))
        os.kill(server.engine_pid(), signal.SIGKILL)
        error = stream.answer()[-1]["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == "engine_dead"
        assert "signal 9" in error["message"]
        (answer,) = whole.answer()
        assert whole.status == 503
        assert answer["error"]["code"] == "engine_dead"
        assert server.wait() == 1, server.log_text()
        assert "the engine is gone: the engine process ended with signal 9" in server.log_text()
        assert "Traceback" not in server.log_text()


def test_a_server_killed_while_its_engine_starts_leaves_no_engine(tmp_path: Path) -> None:
    """The parent may be gone before the engine process has run any of its own code."""
    server = Server(ARGUMENTS, tmp_path / "log")
    try:
        starting(server)
        engine = server.engine_pid()
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        wait_until(lambda: gone(engine), START_S, "the engine process is gone")
    finally:
        if server.process.poll() is None:
            server.kill()


def starting(server: Server, *command: str) -> None:
    """Start the server with a command before it, and wait until its engine process exists."""
    with server.log.open("wb") as log:
        server.process = subprocess.Popen(
            [*HEARING_SIGHUP, *command, *srv_command("launch", "--port", str(server.port), *server.arguments)],
            stdout=log,
            stderr=log,
            env=clean_environment(),
        )
    wait_until(lambda: bool(server.engines()), START_S, "the engine process exists")


def test_sighup_during_the_start_ends_it_in_order(tmp_path: Path) -> None:
    """A terminal that is closed sends it to the group. By default, it would kill the server and leave the rest."""
    server = Server(ARGUMENTS, tmp_path / "log")
    try:
        starting(server)
        engine = server.engine_pid()
        for process in (engine, server.pid):
            os.kill(process, signal.SIGHUP)
        assert server.wait() == 0, server.log_text()
        assert "stopped before the server was ready" in server.log_text()
        assert "Traceback" not in server.log_text()
        assert_nothing_left(server, engine)
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


def test_a_server_that_ignores_sighup_starts_and_serves_on(tmp_path: Path) -> None:
    server = Server(ARGUMENTS, tmp_path / "log")
    try:
        starting(server, "nohup")
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: server.health() == 200, START_S, "the server is healthy")
        os.kill(server.pid, signal.SIGHUP)
        assert server.generate(**greedy("a", 3))["meta_info"]["completion_tokens"] == 3
        assert server.stop() == 0, server.log_text()
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


def test_sigterm_ends_a_server_whose_chat_template_does_not_end(tmp_path: Path, letters_model: Path) -> None:
    """Each rendering takes the 5 s of processor time that it may; others wait, and together they need a minute."""
    hostile = tmp_path / "hostile.jinja"
    hostile.write_text("{{ messages[0].content if messages | length == 1 else (messages | length * 5) ** (10 ** 8) }}")
    model = ("--device", "cpu", "--model-path", str(letters_model), "--load-format", "dummy")
    body = {"messages": [{"role": "user", "content": "a"}] * 2, "max_tokens": 1}
    statuses: list[int | None] = []

    def ask() -> None:
        try:
            statuses.append(httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=REQUEST_S).status_code)
        except httpx.TransportError:
            statuses.append(None)

    with launched(tmp_path / "log", *model, "--chat-template", str(hostile)) as server:
        fine = {**body, "messages": body["messages"][:1]}  # type: ignore[index]
        assert server.post("/v1/chat/completions", **fine).status_code == 200
        left = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
        (renderer,) = server.children("template_child")
        clients = [threading.Thread(target=ask, daemon=True) for _ in range(12)]
        for client in clients:
            client.start()
        used = psutil.Process(renderer).cpu_times().user
        wait_until(lambda: psutil.Process(renderer).cpu_times().user > used + 0.5, 60, "a template is rendered")
        server.terminate()
        assert server.wait(30) == 0, server.log_text()
        for client in clients:
            client.join(RESULT_S)
        assert len(statuses) == len(clients)
        assert set(statuses) == {503}
        assert "Traceback" not in server.log_text()
        wait_until(lambda: all(map(gone, left)), STOP_S, "all processes of the server are gone")


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('the wrong numpy')\n")
    monkeypatch.chdir(tmp_path)
    server = Server(ARGUMENTS, tmp_path / "log", program=SCRIPT)
    try:
        server.start()
        assert server.stop() == 0
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


def test_a_busy_engine_ends_if_its_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Short: the path of a Unix socket is limited to about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="own-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    with launched(tmp_path / "log", *ARGUMENTS) as server:
        engine = server.engine_pid()
        running(server, greedy("A stream", 6000, stream=True))
        assert len(list(folder.glob("srv-*"))) == 1
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        assert_nothing_left(server, engine)
        wait_until(lambda: not list(folder.glob("srv-*")), STOP_S, "the engine has removed the sockets")
    folder.rmdir()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_lets_running_requests_finish(tmp_path: Path, sent: signal.Signals) -> None:
    """Ctrl-C and service managers reach server and engine alike; the engine must leave the decision to the server."""
    with launched(tmp_path / "log", *ARGUMENTS) as server:
        engine = server.engine_pid()
        (stream,) = running(server, greedy("A stream", 60, stream=True))
        os.kill(engine, sent)
        os.kill(server.pid, sent)
        *shown, end = stream.answer()
        assert end == "[DONE]"
        assert shown[-1]["meta_info"]["completion_tokens"] == 60
        assert server.wait() == 0, server.log_text()
        assert_nothing_left(server, engine)


def test_a_second_signal_aborts_running_requests_and_is_logged(tmp_path: Path) -> None:
    with launched(tmp_path / "log", *ARGUMENTS) as server:
        engine = server.engine_pid()
        (stream,) = running(server, greedy("A stream", 6000, stream=True))
        os.kill(server.pid, signal.SIGINT)
        wait_until(lambda: "stopping:" in server.log_text(), STOP_S, "the server has handled the first signal")
        os.kill(server.pid, signal.SIGTERM)
        assert stream.answer()[-1]["error"]["code"] == "shutting_down"
        assert server.wait() == 0, server.log_text()
        assert_nothing_left(server, engine)
        assert "Traceback" not in server.log_text()
