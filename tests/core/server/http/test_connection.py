"""The memory that one client can occupy in the server, with real sockets and the event loop of `srv launch`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httptools
import pytest
import uvicorn
from server_support import eventually, listening
from starlette.types import Message, Receive, Scope, Send

from srv.server.http.access import Access
from srv.server.http.connection import (
    LINGER_BYTES,
    MAX_PIPELINED,
    SEGMENTS_PER_TURN,
    UNREAD_BODY_BYTES,
    LimitedHttpProtocol,
    Turns,
)
from srv.server.http.framing import FREE_CHUNKS, MAX_SECTION_BYTES
from srv.server.http.places import Places

pytestmark = pytest.mark.anyio
READ = 256 * 1024  # bytes that the event loop reads from a socket at once
CHUNKED = b"POST /chunked HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


class CountingParser:
    """The parser, with counts of what it received: bytes, segments, and the most segments in one turn of the loop."""

    def __init__(self, parser: httptools.HttpRequestParser) -> None:
        self._parser = parser
        self.fed = self.segments = self.most = self._this_turn = 0

    def feed_data(self, data: bytes) -> None:
        self.fed += len(data)
        self.segments += 1
        if not self._this_turn:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._this_turn += 1
        self.most = max(self.most, self._this_turn)
        self._parser.feed_data(data)

    def _next_turn(self) -> None:
        self._this_turn = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class ObservedProtocol(LimitedHttpProtocol):
    """Records the maximum numbers of queued requests and unread bytes."""

    def __init__(self, *args: Any, connections: list[ObservedProtocol], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connections.append(self)
        self.counting = self.parser = CountingParser(self.parser)
        self.received = self.max_queued = self.max_unread = 0

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        super().data_received(data)
        self.max_unread = max(self.max_unread, len(self._unread) - self._position)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.max_queued = max(self.max_queued, len(self.pipeline))


class Application:
    """Responds with the path and the size of the body. `/held` and `/watched` wait for `release`; the latter also waits
    for a disconnect, as a stream does. `/early` does not read the body."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.started: list[str] = []
        self.left: list[str] = []  # requests whose client disconnected
        self.headers: dict[str, dict[bytes, bytes]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.started.append(path)
        body = b""
        if path == "/held":
            await self.release.wait()
        while path != "/early":
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(path)
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if path == "/watched":
            watch, release = asyncio.ensure_future(receive()), asyncio.ensure_future(self.release.wait())
            await asyncio.wait({watch, release}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                self.left.append(path)
            watch.cancel()
            release.cancel()
        self.headers[path] = dict(scope["headers"])
        content = f"{path} {len(body)}".encode()
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


@dataclass
class Running:
    server: uvicorn.Server
    port: int
    application: Application
    connections: list[ObservedProtocol] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)


@asynccontextmanager
async def running() -> AsyncGenerator[Running, None]:
    application = Application()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    connections: list[ObservedProtocol] = []
    refusals: list[int] = []
    protocol = cast(
        type[asyncio.Protocol],
        partial(
            ObservedProtocol,
            connections=connections,
            responded=refusals.append,
            refused=lambda status, body: None,
            turns=Turns(),
            places=Places(1000),
        ),
    )
    config = uvicorn.Config(application, http=protocol, lifespan="off", log_level="error", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await eventually(lambda: server.started)
        yield Running(server, listener.getsockname()[1], application, connections, refusals)
    finally:
        application.release.set()
        server.should_exit = True
        await asyncio.wait_for(task, 10)
        listener.close()


class Client:
    """A raw connection. Data is sent in the background, as fast as the server reads it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.sending: asyncio.Task[None] | None = None

    def send(self, parts: Iterable[bytes]) -> None:
        self.sending = asyncio.create_task(self._send(parts))

    async def _send(self, parts: Iterable[bytes]) -> None:
        try:
            for part in parts:
                self._writer.write(part)
                await self._writer.drain()
        except ConnectionError:
            return  # the server has closed

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(30):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name: value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            return int(head[0].split()[1]), headers, await self._reader.readexactly(int(headers["content-length"]))

    async def text(self) -> str:
        return (await self.response())[2].decode()

    async def closed(self, quiet: bool = True) -> bool:
        """Whether the server closes without sending more. `quiet`: the client has shut down its side for writing."""
        async with asyncio.timeout(10):
            if quiet:
                self._writer.write_eof()
            try:
                return await self._reader.read() == b""
            except ConnectionError:
                return True

    def leave(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(port: int, *parts: bytes) -> AsyncGenerator[Client, None]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Client(reader, writer)
    client.send(parts)
    try:
        yield client
    finally:
        if client.sending is not None:
            client.sending.cancel()
        writer.close()


ENDLESS: dict[str, tuple[bytes, bytes, int, str]] = {
    "URL": (b"GET /", b"a", 414, "url_too_long"),
    "header name": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"a", 431, "headers_too_large"),
    "header value": (b"GET / HTTP/1.1\r\nHost: x\r\nA: ", b"a", 431, "headers_too_large"),
    "many headers": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"a: b\r\n", 431, "headers_too_large"),
    "trailer": (CHUNKED + b"0\r\nA: ", b"a", 431, "trailers_too_large"),
    "many trailers": (CHUNKED + b"0\r\n", b"a: b\r\n", 431, "trailers_too_large"),
    "chunk extension": (CHUNKED + b"1;a=", b"a", 400, "chunk_header_too_large"),
    "not HTTP": (b"\x16\x03\x01", b"\x00", 400, "invalid_http"),
}


async def test_endless_sections_are_refused_after_a_bounded_number_of_bytes() -> None:
    faults = []
    async with running() as server:
        for name, (before, endless, status, code) in ENDLESS.items():
            part = endless * (16384 // len(endless))
            async with connected(server.port, before, *[part] * 1024) as client:
                got, headers, body = await client.response()
                await client.closed()
            protocol, error = server.connections[-1], json.loads(body)["error"]
            if (got, error["code"], headers["connection"]) != (status, code, "close"):
                faults.append((name, got, error, headers))
            if protocol.counting.fed > len(before) + MAX_SECTION_BYTES:
                faults.append((name, "fed", protocol.counting.fed))
            if protocol.received > MAX_SECTION_BYTES + LINGER_BYTES + 2 * READ:
                faults.append((name, "received", protocol.received))
        assert server.refusals == [status for _, _, status, _ in ENDLESS.values()]
    assert not faults


async def test_others_are_served_meanwhile_and_the_refusal_is_counted() -> None:
    async with listening(access=Access(key="secret")) as server:
        port = server.http.base_url.port
        assert port is not None
        async with connected(port, b"GET / HTTP/1.1\r\nHost: x\r\nA: ", b"a" * 60_000) as client:
            await asyncio.wait_for(asyncio.shield(cast(Any, client.sending)), 10)
            assert (await server.http.get("/health")).status_code == 200
            client.send([b"a" * 6_000])
            status, _, body = await client.response()
        assert (status, json.loads(body)["error"]["type"]) == (431, "invalid_request_error")
        assert 'srv_http_responses_total{status="431"} 1.0' in (await server.http.get("/metrics")).text


async def test_a_refusal_reaches_a_client_that_sends_everything_before_it_reads() -> None:
    async with (
        running() as server,
        connected(server.port, b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 500_000) as client,
    ):
        await asyncio.wait_for(cast(Any, client.sending), 10)
        await eventually(lambda: server.connections[0].received > 500_000)
        assert (await client.response())[0] == 431
        assert await client.closed(quiet=False)  # although the client leaves the connection open


async def test_pipelined_requests_are_answered_in_order_and_at_most_sixteen_wait() -> None:
    requests = [f"GET /{number} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for number in range(10_000)]
    async with running() as server:
        async with connected(server.port, b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n", *requests) as client:
            await eventually(lambda: server.connections and server.connections[0].max_queued == MAX_PIPELINED)
            await asyncio.wait({cast(Any, client.sending)}, timeout=0.5)  # more than the server reads
            assert len(server.application.started) == 1
            server.application.release.set()
            assert await client.text() == "/held 0"
            responses = [await client.text() for _ in requests]
            assert responses == [f"/{number} 0" for number in range(10_000)]
        protocol = server.connections[0]
        assert protocol.max_queued == MAX_PIPELINED
        assert protocol.max_unread <= READ


async def test_reading_is_paused_while_requests_wait() -> None:
    """Reading a body makes uvicorn resume reading, so without the limit far more would arrive than is answered."""
    request = b"GET /a HTTP/1.1\r\nHost: x\r\nA: %s\r\n\r\n" % (b"a" * 1000)
    first = b"GET /watched HTTP/1.1\r\nHost: x\r\n\r\n"
    async with running() as server, connected(server.port, first, *[request] * 4000) as client:
        await eventually(lambda: server.connections and server.connections[0].max_queued == MAX_PIPELINED)
        await asyncio.wait({cast(Any, client.sending)}, timeout=0.5)
        protocol = server.connections[0]
        assert protocol.received <= 2 * READ + MAX_PIPELINED * len(request)
        assert protocol.counting.fed <= (MAX_PIPELINED + 1) * len(request)
        server.application.release.set()
        assert await client.text() == "/watched 0"
        for _ in range(4000):
            assert await client.text() == "/a 0"
        assert protocol.max_unread <= READ


async def test_data_that_arrives_after_the_pause_is_not_lost() -> None:
    requests = [b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"] + [
        b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(40)
    ]
    async with running() as server, connected(server.port, b"".join(requests[:30])) as client:
        await eventually(lambda: server.connections and server.connections[0].flow.held)
        server.connections[0].data_received(b"".join(requests[30:]))
        server.application.release.set()
        assert [await client.text() for _ in requests] == ["/held 0"] + [f"/{number} 0" for number in range(40)]


async def test_a_body_is_not_read_before_the_application_reads_it() -> None:
    body = b"POST /held HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n", b"a" * 4_000_000
    after = [b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(100)]
    async with running() as server, connected(server.port, *body, *after) as client:
        await eventually(lambda: server.application.started == ["/held"])
        await asyncio.wait({cast(Any, client.sending)}, timeout=0.5)
        assert server.connections[0].received <= 3 * READ
        server.application.release.set()
        assert await client.text() == "/held 4000000"
        assert [await client.text() for _ in after] == [f"/{number} 0" for number in range(100)]
        assert server.connections[0].max_queued <= MAX_PIPELINED


async def test_bodies_in_a_full_pipeline_reach_their_own_requests() -> None:
    request = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
    chunked = b"POST /%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    sizes = [(number * 7919) % 90_000 + 1 for number in range(100)] + [2_000_000]
    parts = [
        (request if number % 2 else chunked)
        % (number, size, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(size, b"\n")[:size])
        for number, size in enumerate(sizes)
    ]
    short = [b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n"] * 20
    async with (
        running() as server,
        connected(server.port, b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n", *short, *parts) as client,
    ):
        await eventually(lambda: server.connections and server.connections[0].flow.held)
        server.application.release.set()
        assert [await client.text() for _ in range(21)] == ["/held 0"] + ["/short 0"] * 20
        assert [await client.text() for _ in sizes] == [f"/{number} {size}" for number, size in enumerate(sizes)]
        assert server.connections[0].max_queued <= MAX_PIPELINED


async def test_a_refusal_waits_for_the_responses_before_it() -> None:
    held, queued = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /queued HTTP/1.1\r\nHost: x\r\n\r\n"
    for invalid in (b"nonsense\r\n\r\n" + queued, CHUNKED + b"nonsense\r\n" + queued):
        async with running() as server, connected(server.port, held + queued + invalid) as client:
            await eventually(lambda: server.connections and server.connections[0].counting.fed > len(held + queued))
            server.application.release.set()
            assert [await client.text(), await client.text()] == ["/held 0", "/queued 0"]
            assert (await client.response())[0] == 400
            assert await client.closed()
            assert server.application.started == ["/held", "/queued"]


async def test_a_running_request_with_an_invalid_body_is_disconnected_and_refused() -> None:
    async with running() as server:
        async with connected(server.port, CHUNKED + b"1\r\na\r\n") as client:
            await eventually(lambda: server.application.started == ["/chunked"])
            client.send([b"nonsense\r\n"])
            assert (await client.response())[0] == 400
            assert await client.closed()
        assert server.application.left == ["/chunked"]
        async with connected(server.port, CHUNKED.replace(b"chunked HTTP", b"early HTTP")) as client:
            assert (await client.response())[0] == 200
            client.send([b"nonsense\r\n"])
            assert await client.closed()  # one request has one response
        assert server.refusals == [400]


async def test_data_after_the_last_request_of_a_connection_is_not_parsed() -> None:
    get, rest = b"GET /held HTTP/1.1\r\nHost: x\r\n", b"\r\nGET /second HTTP/1.1\r\nHost: x\r\n\r\n"
    upgrade = b"Connection: Upgrade\r\nUpgrade: "
    handshake = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    for name, stream in {
        "close": get + b"Connection: close\r\n" + rest,
        "HTTP/1.0": get.replace(b"1.1", b"1.0") + rest,
        "h2c": get + upgrade + b"h2c\r\n" + rest,
        "websocket": get + upgrade + b"websocket\r\n" + handshake + rest,
    }.items():
        async with running() as server, connected(server.port, stream, b"a" * 2 * MAX_SECTION_BYTES) as client:
            await asyncio.wait_for(cast(Any, client.sending), 10)
            await eventually(lambda: server.connections[0].received >= 2 * MAX_SECTION_BYTES)
            server.application.release.set()
            status, headers, body = await client.response()
            assert (status, headers["connection"], body) == (200, "close", b"/held 0"), name
            assert await client.closed(), name
            assert (server.application.started, server.refusals) == (["/held"], []), name
    async with (
        running() as server,
        connected(server.port, get + upgrade + b"h2c\r\nContent-Length: 3\r\n\r\nabc") as client,
    ):
        assert json.loads(await client.text())["error"]["code"] == "upgrade_with_body"
        assert server.application.started == []


async def test_trailers_do_not_become_headers() -> None:
    request = CHUNKED + b"0\r\nAuthorization: Bearer x\r\n\r\n"
    async with (
        running() as server,
        connected(server.port, request + b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n\r\n") as client,
    ):
        assert await client.text() == "/chunked 0"
        assert await client.text() == "/ 0"
        assert server.application.headers == {
            "/chunked": {b"host": b"x", b"transfer-encoding": b"chunked"},
            "/": {b"host": b"x", b"a": b"b"},
        }


async def test_a_disconnect_ends_the_running_request_although_others_wait() -> None:
    async with running() as server:
        async with connected(
            server.port, b"GET /watched HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3
        ) as client:
            await eventually(lambda: server.connections and server.connections[0].max_queued == 3)
            client.leave()
            await eventually(lambda: server.application.left == ["/watched"])
        assert server.application.started == ["/watched"]


async def test_a_shutdown_answers_waiting_requests() -> None:
    waiting = b"GET /waiting HTTP/1.1\r\nHost: x\r\n\r\n"
    async with (
        running() as server,
        connected(server.port, b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n" + waiting * 100) as client,
    ):
        await eventually(lambda: server.connections and server.connections[0].max_queued == MAX_PIPELINED)
        server.server.should_exit = True
        await eventually(lambda: server.connections[0].cycle.keep_alive is False)
        server.application.release.set()
        responses = [await client.text() for _ in range(1 + MAX_PIPELINED)]
        assert responses == ["/held 0"] + ["/waiting 0"] * MAX_PIPELINED
        assert await client.closed()


async def test_a_connection_is_reused_and_100_continue_is_sent_when_the_body_is_read() -> None:
    async with running() as server, connected(server.port) as client:
        for number in range(3):
            client.send([b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number])
            assert await client.text() == f"/{number} 0"
        client.send([b"POST /post HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"])
        assert await client._reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send([b"abc"])
        assert await client.text() == "/post 3"
        assert len(server.connections) == 1


async def test_a_body_of_tiny_chunks_is_parsed_over_many_turns_of_the_loop() -> None:
    """Nobody waits for more than a few hundred segments, whatever arrives at once."""
    chunks = b"1\r\na\r\n" * FREE_CHUNKS
    pipelined = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"
    async with running() as server, connected(server.port, CHUNKED + chunks + b"0\r\n\r\n" + pipelined) as client:
        assert await client.text() == f"/chunked {FREE_CHUNKS}"
        assert await client.text() == "/next 0"
        counts = server.connections[0].counting
        assert counts.segments >= 2 * FREE_CHUNKS
        assert counts.most <= 2 * SEGMENTS_PER_TURN  # as they arrive, and in the turn of the connection
        assert server.connections[0].max_unread <= 2 * READ


async def test_a_body_of_many_tiny_chunks_is_refused() -> None:
    async with running() as server, connected(server.port, CHUNKED, *[b"1\r\na\r\n" * 10_000] * 100) as client:
        status, headers, body = await client.response()
        assert (status, json.loads(body)["error"]["code"]) == (400, "chunks_too_small")
        assert server.connections[0].counting.segments <= 4 * FREE_CHUNKS
        assert headers["connection"] == "close"
        await client.closed()
    large = b"%x\r\n%s\r\n" % (256, b"a" * 256)
    parts = [b"1\r\na\r\n" * 8000, *[large * 1000] * 20, b"0\r\n\r\n"]
    async with running() as server, connected(server.port, CHUNKED, *parts) as client:
        assert await client.text() == f"/chunked {8000 + 20_000 * 256}"


async def test_a_response_before_the_body_closes_the_connection_and_the_rest_is_not_parsed() -> None:
    heads = {
        "length": b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n",
        "chunks": CHUNKED.replace(b"chunked HTTP", b"early HTTP"),
        "close": b"POST /early HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100000000\r\n\r\n",
    }
    for name, head in heads.items():
        async with running() as server, connected(server.port, head) as client:
            status, headers, _ = await client.response()
            assert (status, headers["connection"]) == (200, "close"), name
            fed = server.connections[0].counting.fed
            client.send([b"1\r\na\r\n" * 10_000] * 1000)
            await client.closed(quiet=False)
            assert server.connections[0].counting.fed == fed, name
            assert server.connections[0].received <= UNREAD_BODY_BYTES + 2 * READ, name
            assert server.application.started == ["/early"], name


async def test_a_response_without_its_body_reaches_a_client_that_sends_everything_before_it_reads() -> None:
    head, body = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n", b"a" * 8_000_000
    async with running() as server, connected(server.port, head, body) as client:
        await asyncio.wait_for(cast(Any, client.sending), 10)
        assert (await client.response())[0] == 200
        assert await client.closed()
        assert server.refusals == []
