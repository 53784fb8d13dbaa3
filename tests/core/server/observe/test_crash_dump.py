"""Crash dumps: which requests they contain, which of these had no complete response, and what no body can break."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
from every import every
from fastapi import FastAPI, Request, Response

from srv.args.groups.observe import ObserveArgs
from srv.cli.main import main
from srv.cli.replay import replay
from srv.errors import EngineDead
from srv.server.http.events import EventStream
from srv.server.http.observing import add_observing
from srv.server.observe.crash_dump import FORMAT, CrashRecorder, DumpError, read_dump


async def _dying() -> AsyncGenerator[bytes, None]:
    yield b"data: 1\n\n"
    raise EngineDead("it was killed")


def application(recorder: CrashRecorder) -> FastAPI:
    app = FastAPI()

    @app.post("/{name}")
    async def answer(name: str, request: Request) -> Response:
        await request.body()
        if name == "stream":
            return EventStream(_dying(), on_close=lambda: None)
        return Response(status_code=int(name))

    add_observing(app, ObserveArgs(), None, recorder)
    return app


def test_what_was_open_when_the_engine_was_lost_is_incomplete(tmp_path: Path) -> None:
    recorder = CrashRecorder(tmp_path, {})

    async def post_all() -> None:
        transport = httpx.ASGITransport(application(recorder))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in ("/200", "/400", "/503", "/stream"):
                await client.post(path, content=b'{"prompt": "a"}')

    asyncio.run(post_all())
    file = recorder.dump("a test")
    assert file is not None
    _, requests = read_dump(file)
    assert [(request["path"], request["complete"]) for request in requests] == [
        ("/200", True),
        ("/400", True),
        ("/503", False),
        ("/stream", False),
    ]
    assert requests[0]["body"] == {"prompt": "a"}


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff", b"{"])
def test_any_body_is_dumped(tmp_path: Path, body: bytes) -> None:
    recorder = CrashRecorder(tmp_path, {})
    recorded = recorder.begin("POST", "/generate")
    assert recorded is not None
    recorder.add(recorded, body)
    file = recorder.dump("a test")
    assert file is not None
    (line,) = (json.loads(line) for line in file.read_text().splitlines()[1:])
    assert "base64" in line


def test_the_oldest_bodies_are_dropped_beyond_the_limit(tmp_path: Path) -> None:
    recorder = CrashRecorder(tmp_path, {}, most_bytes=10)
    first, second = recorder.begin("POST", "/1"), recorder.begin("POST", "/2")
    assert first is not None
    assert second is not None
    recorder.add(first, b"123456")
    recorder.add(second, b"123456")
    recorder.add(first, b"more of a request that is not kept")
    file = recorder.dump("a test")
    assert file is not None
    assert [request["path"] for request in read_dump(file)[1]] == ["/2"]


def test_a_server_that_dies_while_it_answers_is_no_answer() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def cut_off() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab")

        thread = threading.Thread(target=cut_off, daemon=True)
        thread.start()
        request = {"at": 0.0, "method": "POST", "path": "/generate", "body": {}}
        assert [answer.status for answer in replay([request], url, speed=0)] == [0]
        thread.join(10)
    assert [answer.status for answer in replay([request], "nowhere", speed=0)] == [0]


GOOD = {"at": 1.0, "method": "POST", "path": "/generate"}


def test_what_a_server_answers_does_not_reach_the_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does the path of a dump."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nä\x1b[2J\a\x9b".encode())

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        file = dump_of(tmp_path / "dump", {**GOOD, "path": "/\x1b"})
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["replay", str(file), "--url", url, "--speed", "0", "--show"]) == 0
        thread.join(10)
    shown = capsys.readouterr().out
    assert "ä\\x1b[2J\\x07\\x9b" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def dump_of(file: Path, *lines: object) -> Path:
    written = [json.dumps({"format": FORMAT}), *(line if isinstance(line, str) else json.dumps(line) for line in lines)]
    file.write_text("\n".join(written))
    return file


@every(
    ("line", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ({**GOOD, "at": "soon"}, "at"),
        ({**GOOD, "at": [1]}, "at"),
        ({**GOOD, "at": float("nan")}, "at"),
        ({**GOOD, "at": 1e300}, "at"),
        ({**GOOD, "method": 3}, "method"),
        ({**GOOD, "method": "GET / HTTP/1.1"}, "method"),
        ({**GOOD, "path": None}, "path"),
        ({**GOOD, "path": "@evil.example/"}, "path"),
        ({**GOOD, "path": ".evil.example/"}, "path"),
        ({**GOOD, "path": "/\ud800"}, "surrogates"),
        ({**GOOD, "base64": 3}, "base64"),
        ({**GOOD, "base64": "a"}, "base64"),
        ({**GOOD, "content_encoding": "gzip\r\nx: y"}, "content_encoding"),
        ({"path": "/"}, "missing required field"),
        ("3", "line 3"),
    ],
)
def test_a_damaged_dump_is_refused_with_its_line(
    tmp_path: Path, line: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = dump_of(tmp_path / "dump", GOOD, line)
    with pytest.raises(DumpError, match="cannot be replayed") as caught:
        read_dump(file)
    assert said in str(caught.value).lower()
    assert main(["replay", str(file)]) != 0
    assert "no_crash_dump" in capsys.readouterr().err


def test_the_key_is_sent_to_the_server_and_nowhere_else() -> None:
    """Neither does the path name a host, nor is a redirect followed."""
    with socket.socket() as listener, socket.socket() as other:
        for listening in (listener, other):
            listening.bind(("127.0.0.1", 0))
            listening.listen()
        elsewhere = f"127.0.0.1:{other.getsockname()[1]}"
        heads: list[bytes] = []

        def redirect() -> None:
            for _ in range(3):
                connection, _ = listener.accept()
                with connection:
                    heads.append(connection.recv(65536))
                    location = f"location: http://{elsewhere}/\r\n"
                    connection.sendall(f"HTTP/1.1 302 Found\r\n{location}content-length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=redirect, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        paths = ("/generate", f"//{elsewhere}/", "/v1/models/a b?c=#d\u00e9")
        for path in paths:
            (answer,) = replay([{**GOOD, "path": path, "body": {}}], url, key="secret", speed=0, timeout=5)
            assert answer.status == 302, answer
        thread.join(10)
        assert all(b"Bearer secret" in head for head in heads)
        assert heads[2].startswith(b"POST /v1/models/a%20b%3Fc%3D%23d%C3%A9 HTTP")
        other.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.accept()
