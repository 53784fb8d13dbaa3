"""The arguments that protect a server: with two values of each, real servers answer differently.

`plain` has the defaults, `guarded` another value of each argument. The last tests end the servers, or their engines.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_support import Server, greedy, launched, wait_until

from srv_matrix.pytest_plugin import covers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # clients and engines wait until they are ended

KEY, ADMIN = "a key from a file", "a key of operators"
BODY = {"prompt": "a", "max_tokens": 1}
SOFT, HARD = 3, 8  # seconds


class GuardedServer(Server):
    """A server whose clients send the key of operators, which all paths accept."""

    def client(self, **more: Any) -> httpx.Client:
        return super().client(headers={"authorization": f"Bearer {ADMIN}", **more.pop("headers", {})}, **more)


@pytest.fixture(scope="module")
def common(letters_model: Path, srv_device: str) -> tuple[str, ...]:
    pool = ("--max-running-requests", "1", "--max-total-tokens", "4096")
    return ("--device", srv_device, "--model-path", str(letters_model), "--load-format", "dummy", *pool)


@pytest.fixture(scope="module")
def plain(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with launched(tmp_path_factory.mktemp("plain") / "log", *common) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "key").write_text(f"{KEY}\n")
    arguments = (
        *("--api-key-file", str(folder / "key"), "--admin-api-key", ADMIN),
        *("--allowed-hosts", "my.host", "--allowed-origins", "https://my.page"),
        *("--max-connections", "8", "--connection-timeout-seconds", "1.5", "--max-held-request-bytes", "4096"),
        *("--soft-watchdog-timeout", str(SOFT), "--watchdog-timeout", str(HARD)),
    )
    server = GuardedServer((*common, *arguments), folder / "log")
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


def completion(server: Server, **headers: str) -> int:
    return httpx.post(f"{server.base}/v1/completions", json=BODY, headers=headers, timeout=60).status_code


@covers("api_key_file")
def test_api_key_file(plain: Server, guarded: Server) -> None:
    assert completion(plain) == 200
    assert [completion(guarded), completion(guarded, authorization=f"Bearer {KEY}")] == [401, 200]


@covers("admin_api_key")
def test_admin_api_key(plain: Server, guarded: Server) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{plain.base}/flush_cache", headers=headers).status_code == 200
    assert httpx.post(f"{guarded.base}/flush_cache", headers=headers).status_code == 401
    assert guarded.post("/flush_cache").status_code == 200


@covers("allowed_hosts")
def test_allowed_hosts(plain: Server, guarded: Server) -> None:
    key = f"Bearer {KEY}"
    assert [completion(server, host="my.host", authorization=key) for server in (plain, guarded)] == [403, 200]
    assert completion(guarded, host="other.host", authorization=key) == 403


@covers("allowed_origins")
def test_allowed_origins(plain: Server, guarded: Server) -> None:
    key = f"Bearer {KEY}"
    statuses = [completion(server, origin="https://my.page", authorization=key) for server in (plain, guarded)]
    assert statuses == [403, 200]


@covers("max_held_request_bytes=268435456", "max_held_request_bytes=4096")
def test_max_held_request_bytes(plain: Server, guarded: Server) -> None:
    body = {"prompt": "a" * 3000, "max_tokens": 1, "user": "u" * 2000}
    assert [server.post("/v1/completions", **body).status_code for server in (plain, guarded)] == [200, 413]


@covers("max_connections=1000", "max_connections=8")
def test_max_connections(plain: Server, guarded: Server) -> None:
    get = f"GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"

    def status(connection: socket.socket, path: str) -> bytes:
        connection.sendall((get % path).encode())
        return connection.recv(12)

    def connect(server: Server) -> socket.socket:
        return socket.create_connection(("127.0.0.1", server.port), timeout=10)

    for server, expected in ((plain, b"HTTP/1.1 200"), (guarded, b"HTTP/1.1 503")):
        used = [connect(server) for _ in range(8)]
        assert [status(connection, "/health") for connection in used] == [b"HTTP/1.1 200"] * 8
        with closing(connect(server)) as another, closing(connect(server)) as probe:
            assert status(another, "/v1/models") == expected
            assert status(probe, "/health") == b"HTTP/1.1 200"
        for connection in used:
            connection.close()

    def free() -> bool:
        with closing(connect(guarded)) as another:
            return status(another, "/v1/models") == b"HTTP/1.1 200"

    wait_until(free, 10, "connections are free again")


@covers("connection_timeout_seconds=60.0", "connection_timeout_seconds=1.5")
def test_connection_timeout_seconds(plain: Server, guarded: Server) -> None:
    with (
        closing(socket.create_connection(("127.0.0.1", plain.port))) as kept,
        closing(socket.create_connection(("127.0.0.1", guarded.port), timeout=20)) as dropped,
    ):
        assert dropped.recv(1) == b""
        kept.setblocking(False)
        with pytest.raises(BlockingIOError):
            kept.recv(1)


def test_a_client_that_does_not_read_gives_its_pages_back(guarded: Server) -> None:
    """Sixteen long outputs, one after another; the first is larger than what the buffers of two sockets hold."""
    before = guarded.metrics()["srv_sequences_aborted_total"]
    output = {"n": 16, "max_tokens": 4000, "ignore_eos": True, "logprobs": 5, "stream": True}
    content = json.dumps({"prompt": "a", **output}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN}\r\nContent-Length: "
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", guarded.port))
        client.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)
        wait_until(lambda: guarded.metrics()["srv_kv_pages_held"] > 0, 30, "its request runs")
        after = guarded.wait_pages_back()
        assert after["srv_sequences_aborted_total"] > before
        assert after["srv_kv_pages_free"] + after["srv_kv_pages_cached"] == after["srv_kv_pages_total"]


@covers("soft_watchdog_timeout=300.0", f"soft_watchdog_timeout={float(SOFT)}")
def test_soft_watchdog_timeout(plain: Server, guarded: Server) -> None:
    engines = [plain.engine_pid(), guarded.engine_pid()]
    for engine in engines:
        os.kill(engine, signal.SIGSTOP)
    try:
        wait_until(lambda: guarded.health() == 503, HARD, "the server is unhealthy")
        assert plain.health() == 200
    finally:
        for engine in engines:
            os.kill(engine, signal.SIGCONT)
    wait_until(lambda: guarded.health() == 200, 30, "the server is healthy again")
    assert "soft_watchdog_timeout" in guarded.log_text()
    assert "in run" in guarded.log_text()  # the stack of the engine's loop
    assert "soft_watchdog_timeout" not in plain.log_text()


@covers("watchdog_timeout=300.0", f"watchdog_timeout={float(HARD)}")
def test_watchdog_timeout(plain: Server, guarded: Server) -> None:
    engines = [plain.engine_pid(), guarded.engine_pid()]
    for engine in engines:
        os.kill(engine, signal.SIGSTOP)
    try:
        assert guarded.wait(60) == 1
        assert "hung for 8 s (watchdog_timeout)" in guarded.log_text()
        assert plain.health() == 200
    finally:
        os.kill(engines[0], signal.SIGCONT)


@covers("max_connections=1", "connection_timeout_seconds=0.01", "watchdog_timeout=3.0")
def test_smallest_limits(common: tuple[str, ...], tmp_path: Path) -> None:
    """A request is served on the only connection, an idle one is closed at once, and a hang ends the server."""
    limits = ("--max-connections", "1", "--connection-timeout-seconds", "0.01", "--watchdog-timeout", "3")
    with launched(tmp_path / "log", *common, *limits) as server:

        def another() -> bytes:
            with closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as connection:
                with suppress(ConnectionError):
                    connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    return connection.recv(12)
                return b""  # idle for 10 ms before the request arrived

        answers: list[Any] = []

        def generate() -> None:
            while not answers:
                with suppress(httpx.RemoteProtocolError, httpx.ReadError):  # as above
                    answers.append(server.generate(**greedy("a", 2000)))

        client = threading.Thread(target=generate, daemon=True)
        client.start()
        wait_until(lambda: another() == b"HTTP/1.1 503", 30, "the only connection is taken")
        client.join(120)
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "length"
        wait_until(lambda: another() == b"HTTP/1.1 200", 30, "the connection is free again")

        def idle() -> bytes:
            with closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as connection:
                return connection.recv(1)

        wait_until(lambda: idle() == b"", 30, "an idle connection is closed, once the one before it is gone")
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert server.wait(60) == 1
        assert "hung for 3 s (watchdog_timeout)" in server.log_text()


def test_a_hang_up_lets_requests_finish(plain: Server) -> None:
    """SIGHUP, as a closed terminal sends it to the whole process group."""
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(plain.generate(**greedy("a", 4000))), daemon=True)
    client.start()
    wait_until(lambda: plain.metrics()["srv_requests_running"] == 1, 30, "the request runs")
    for process in (plain.engine_pid(), plain.pid):
        os.kill(process, signal.SIGHUP)
    client.join(60)
    assert plain.wait() == 0, plain.log_text()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "length"
