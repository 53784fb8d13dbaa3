"""Every response has an id of its request, and every error the form of its path: answers, streams, refusals, unknown
paths, and requests that no application gets, because they are not HTTP or exceed a limit of the connection."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from every import every
from server_support import listening, serving

from srv.server.http.connection import ConnectionLimits
from srv.server.http.framing import FREE_CHUNKS

pytestmark = pytest.mark.anyio
COMPLETION = "/v1/completions"


@every(
    ("path", "body", "status"),
    [
        (COMPLETION, {"prompt": "a", "max_tokens": 1}, 200),
        (COMPLETION, {"prompt": "a", "max_tokens": 1, "stream": True}, 200),
        (COMPLETION, {}, 400),
        ("/v1/messages", {}, 400),
        ("/nowhere", {}, 404),
    ],
)
async def test_every_response_has_the_id_of_the_client_or_a_new_one(path: str, body: object, status: int) -> None:
    async with serving() as server:
        named = await server.http.post(path, json=body, headers={"x-request-id": "mine-1"})
        assert (named.status_code, named.headers["x-request-id"]) == (status, "mine-1")
        own_ids = [(await server.http.post(path, json=body)).headers["x-request-id"] for _ in range(2)]
        assert len({*own_ids}) == 2
        for wrong in ("x" * 257, "a b", ""):
            other = await server.http.post(path, json=body, headers={"x-request-id": wrong})
            assert other.headers["x-request-id"] not in (wrong, *own_ids)


async def test_anthropics_id_is_the_same() -> None:
    async with serving() as server:
        response = await server.http.post("/v1/messages", json={})
        assert response.headers["x-request-id"] == response.headers["request-id"] == response.json()["request_id"]


CHUNKED = b"POST %s HTTP/1.1\r\nHost: x\r\nx-request-id: mine-1\r\ntransfer-encoding: chunked\r\n\r\n"
TINY_CHUNKS = b"1\r\na\r\n" * (2 * FREE_CHUNKS)
LONG_HEADER = b"a: " + b"b" * 70_000


async def refused(port: int | None, sent: bytes) -> tuple[int, dict[str, str], dict[str, object]]:
    """The last response on a connection that sends these bytes: its status, its headers and its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(10):
            answered = await reader.read()
    finally:
        writer.close()
    head, _, body = answered[answered.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(re.findall(r"(?m)^(\S+): (.*)$", "\n".join(lines))), json.loads(body)


@every(
    ("sent", "status", "anthropic", "name"),
    [
        (b"\x16\x03\x01", 400, False, None),
        (b"GET /v1/messages?" + b"a" * 70_000, 414, True, None),
        (b"GET /v1/messagesandmore?" + b"a" * 70_000, 414, False, None),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-request-id: mine-1\r\n" + LONG_HEADER, 431, False, "mine-1"),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-request-id: a b\r\n" + LONG_HEADER, 431, False, None),
        (b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", 400, True, None),
        (b"POST /v1/mess%61ges/count_tokens HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", 400, True, None),
        (b"POST http://a/v1/messages HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", 400, True, None),
        (b"POST /llm/v1/messages HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", 400, True, None),
        (b"POST /other/v1/messages HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", 400, False, None),
        (CHUNKED % b"/v1/messages" + TINY_CHUNKS, 400, True, "mine-1"),
        (CHUNKED % b"/v1/completions" + TINY_CHUNKS, 400, False, "mine-1"),
        (
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-request-id: mine-1\r\ncontent-length: 2\r\n\r\n{}\x16",
            400,
            False,
            None,
        ),
        (b"POST /v1/messages HTTP/1.1\r\nHost: x\r\ncontent-length: 2\r\n\r\n{}" + b"\r\n" * 300, 431, False, None),
        (b"\r\n" * 300, 431, False, None),
    ],
)
async def test_refusals_of_a_connection(sent: bytes, status: int, anthropic: bool, name: str | None) -> None:
    """In the last cases nothing is known of the request: what was answered before it is another one."""
    async with listening(root_path="/llm") as server:
        got, headers, body = await refused(server.http.base_url.port, sent)
    assert (got, body.get("type") == "error", "request-id" in headers) == (status, anthropic, anthropic)
    assert set(body["error"]) == ({"type", "message"} if anthropic else {"message", "type", "param", "code"})  # type: ignore[call-overload]
    if name is None:
        assert re.fullmatch(r"req_[0-9a-f]{32}", headers["x-request-id"])
        assert not anthropic or headers["x-request-id"] == headers["request-id"] == body["request_id"]
    else:
        assert headers["x-request-id"] == name


async def test_a_full_server_refuses_in_the_form_of_the_path_and_answers_probes() -> None:
    async with listening(limits=ConnectionLimits(connections=0), root_path="/llm") as server:
        port = server.http.base_url.port
        got, headers, body = await refused(
            port, b"POST /v1/messages HTTP/1.1\r\nHost: x\r\ncontent-length: 2\r\n\r\n{}"
        )
        assert (got, headers["x-request-id"], headers["retry-after"]) == (503, body["request_id"], "5")
        for path in ("/health", "/llm/health"):
            assert (await server.http.get(path)).status_code == 200
