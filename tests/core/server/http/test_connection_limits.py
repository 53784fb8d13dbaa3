"""How many connections and bodies the server holds, and for how long, with real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import zlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from server_support import Serving, eventually, listening

from srv.io.messages import Abort
from srv.server.http.access import Access
from srv.server.http.connection import ConnectionLimits
from srv.testing.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
SHORT = ConnectionLimits(seconds=0.3)
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def raw(server: Serving, *parts: bytes) -> AsyncGenerator[asyncio.StreamReader, None]:
    """A connection that sends `parts` and is closed at the end."""
    port = server.http.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
        yield reader
    finally:
        writer.close()


async def response(reader: asyncio.StreamReader) -> bytes:
    """One whole response."""
    async with asyncio.timeout(10):
        begin = await reader.readuntil(b"\r\n\r\n")
        (length,) = re.findall(rb"content-length: (\d+)", begin.lower())
        return begin + await reader.readexactly(int(length))


async def closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(0.2):
            return await reader.read() == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that the server sends until it closes."""
    async with asyncio.timeout(10):
        return await reader.read()


def head(path: str, length: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_connections_that_wait_for_their_client_are_closed() -> None:
    async with (
        listening(limits=SHORT, body_seconds=0.3) as server,
        raw(server) as silent,
        raw(server, b"GET /health HTT") as half,
        raw(server, HEALTH) as idle,
        raw(server, head("/v1/completions", 500), b"{") as body,
    ):
        assert await rest(silent) == b""
        assert b" 408 " in await rest(half)
        answered = await rest(idle)
        assert answered.startswith(b"HTTP/1.1 200 ")
        assert answered.count(b"HTTP/1.1") == 1
        assert b" 408 " in await rest(body)


async def test_a_request_that_takes_long_is_no_idle_connection() -> None:
    async with listening(FakeEngine(step_seconds=0.05), limits=ConnectionLimits(seconds=0.2)) as server:
        response = await server.post("/v1/completions", prompt="a", max_tokens=12)
        assert response.status_code == 200


async def test_a_head_that_trickles_has_no_more_time() -> None:
    async with listening(limits=SHORT) as server:
        port = server.http.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def trickle() -> None:
            for byte in b"GET /health HTTP/1.1\r\nHost: " + b"a" * 1000:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        assert b" 408 " in await reader.readuntil(b"\r\n\r\n")
        trickling.cancel()
        writer.close()


async def test_the_number_of_connections_is_limited() -> None:
    async with listening(limits=ConnectionLimits(connections=2)) as server:
        async with raw(server, HEALTH) as first, raw(server, HEALTH) as second:
            for connection in (first, second):  # the server has them for certain when they have got an answer
                assert b" 200 " in await response(connection)
            async with raw(server, MODELS) as third:
                assert b" 503 " in await response(third)
            async with raw(server, HEALTH * 2) as probe:
                answered = await rest(probe)  # a place of the reserve is for one request
                assert (answered.count(b" 200 "), answered.count(b"connection: close")) == (1, 1)
            assert not second.at_eof()
        async with asyncio.timeout(10):  # the server may hear later that they are closed
            while (await server.http.get("/v1/models")).status_code != 200:
                await asyncio.sleep(0.005)


async def test_connections_that_send_nothing_give_way_to_those_that_do() -> None:
    async with listening(limits=ConnectionLimits(connections=4)) as server, AsyncExitStack() as stack:
        used = await stack.enter_async_context(raw(server, HEALTH))
        assert b" 200 " in await response(used)
        silent = [await stack.enter_async_context(raw(server, b"GET /hea"[:size])) for size in range(8)]
        async with raw(server, MODELS) as client:
            assert b" 200 " in await response(client)
        gone = [connection for connection in silent if await closed(connection)]
        assert gone == silent[:6]  # the oldest ones, for the others and the client
        assert not used.at_eof()


@pytest.mark.parametrize("sent", [MODELS, HEALTH, head("/v1/completions", 1000) + b"{"], ids=["get", "probe", "body"])
async def test_connections_without_a_key_do_not_lock_out_clients_that_have_one(sent: bytes) -> None:
    limits = ConnectionLimits(connections=4)
    async with listening(limits=limits, access=Access(key="k")) as server, AsyncExitStack() as stack:
        keyed = MODELS[:-2] + b"X-Api-Key: k\r\n\r\n"
        client = await stack.enter_async_context(raw(server, keyed))
        assert b" 200 " in await response(client)
        for _ in range(8):
            assert b"HTTP/1.1 " in await response(await stack.enter_async_context(raw(server, sent)))
        async with raw(server, keyed) as other:
            assert b" 200 " in await response(other)
        async with raw(server, HEALTH) as probe:
            assert b" 200 " in await response(probe)
        assert not client.at_eof()


async def test_a_client_that_does_not_read_is_dropped_and_its_request_aborted() -> None:
    engine = FakeEngine(step_seconds=0.001)
    limits = {"context_length": 100_000, "max_request_tokens": 100_000}
    async with listening(engine, limits=SHORT, **limits) as server:
        body = json.dumps({"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 90_000}}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.http.base_url.port))
            await asyncio.get_running_loop().sock_sendall(client, head("/generate", len(body)) + body)
            await eventually(lambda: engine.running)
            await eventually(lambda: any(isinstance(message, Abort) for message in engine.received), 20)
            await eventually(lambda: not engine.running and server.app.state.lifecycle.active == 0)


async def test_the_bodies_of_all_requests_together_are_limited() -> None:
    async with listening(max_held_request_bytes=3000, body_seconds=5) as server:
        held = b'{"prompt": "' + b"a" * 1500
        async with raw(server, head("/v1/completions", 2000), held):
            await eventually(lambda: server.app.state.service.bodies.held >= 1500)
            refused = await server.post("/v1/completions", prompt="a" * 1700, max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_bytes_held")
            assert "retry-after" in refused.headers
            assert (await server.post("/v1/completions", prompt="a", max_tokens=1)).status_code == 200
        await eventually(lambda: server.app.state.service.bodies.held == 0)
        larger = await server.post("/v1/completions", prompt="a" * 3100, max_tokens=1)
        assert larger.status_code == 413


@pytest.mark.parametrize(
    ("encoding", "content", "status"),
    [
        ("gzip", gzip.compress(BODY, mtime=0), 200),
        ("deflate", zlib.compress(BODY), 200),
        ("identity", BODY, 200),
        ("gzip", gzip.compress(b"[" + b" " * 10**7, mtime=0), 413),  # 10 kB that become 10 MB
        ("gzip", gzip.compress(BODY, mtime=0)[:-4], 400),
        ("gzip", BODY, 400),
        ("br", BODY, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY, mtime=0), mtime=0), 415),
    ],
)
async def test_compressed_bodies(encoding: str, content: bytes, status: int) -> None:
    async with listening(max_request_bytes=2**20) as server:
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        response = await server.http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == status, response.text
        assert server.app.state.service.bodies.held == 0
