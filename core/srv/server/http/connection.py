"""One client connection: uvicorn's HTTP protocol, with limits on the memory and the time that a client can occupy.

Owns how long a connection may be idle, which bytes are passed to the parser and when, how many pipelined requests wait,
and how a connection that violates HTTP or a limit, or has a response before its body, is closed. `Places` decides which
connections stay. Must not know endpoints. Runs before authentication, for every client.

    transport ──► unread ──► Framer ──► parser ──► running request, pipeline (at most 16) ──► application
        ▲ paused while the pipeline is full, or `Turns` has more to parse  │
        └────────────────────────────── a response has ended ◄─────────────┘
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from srv.errors import RequestError
from srv.server.http.access import OPEN_PATHS
from srv.server.http.body import LINGER_SECONDS
from srv.server.http.failures import describe, error_response
from srv.server.http.framing import Framer, Section
from srv.server.http.heads import check_codings, check_host, origin_form
from srv.server.http.places import BytePlace, Places
from srv.server.http.request_ids import HEADER, id_of
from srv.server.http.root_path import without_prefix

MAX_PIPELINED = 16  # requests of one connection that wait while another one runs
SEGMENTS_PER_TURN = 256  # parsed of one connection before others have their turn: a millisecond or two
LINGER_BYTES = 1024 * 1024  # bytes that are read and discarded after a refusal
UNREAD_BODY_BYTES = 16 * LINGER_BYTES  # the same after a response that did not need the body: clients send it first
NEVER_SECONDS = 10**6

Refused = Callable[[int, Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`connections`: at the same time. `seconds`: for which one may be idle, take to send the head of a request, or
    leave its response unread."""

    connections: int = 1000
    seconds: float = 60.0


DEFAULT_LIMITS = ConnectionLimits()


def http_protocol(
    responded: Callable[[int], None],
    refused: Refused,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    prefix: str = "",
) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`. Both functions are called for each refusal that is sent here: `responded` with
    its status, `refused` also with its error body in OpenAI's form. `prefix`: `--root-path`. uvicorn's own limit of
    idle time, `timeout_keep_alive`, is not used.
    """
    protocol = partial(
        LimitedHttpProtocol,
        responded=responded,
        refused=refused,
        limits=limits,
        turns=Turns(),
        places=Places(limits.connections),
        prefix=prefix,
    )
    return cast(type[asyncio.Protocol], protocol)


class Turns:
    """The connections with more to parse than `SEGMENTS_PER_TURN`. One of them goes on in each turn of the event loop,
    so that however many there are, everything else waits for one."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def wait(self, go_on: Callable[[], None]) -> None:
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        try:
            self._waiting[0]()
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)


class LimitedFlow(FlowControl):
    """uvicorn's flow control, which resumes reading when a response ends or an application waits for its request.

    While `held` it does not resume: the end of a response frees only one place in a full pipeline. While `behind`
    neither: bytes wait for their turn to be parsed; what uvicorn asked for is then done by `catch_up`.
    """

    held = behind = False
    _wanted = True  # whether uvicorn wants to read

    def hold(self) -> None:
        self.held = True
        self.pause_reading()

    def fall_behind(self) -> None:
        self.behind = True
        super().pause_reading()

    def catch_up(self) -> None:
        self.behind = False
        if self._wanted:
            self.resume_reading()

    def pause_reading(self) -> None:
        self._wanted = False
        super().pause_reading()

    def resume_reading(self) -> None:
        self._wanted = True
        if not self.held and not self.behind:
            super().resume_reading()


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which parses all received bytes at once, changed to parse them in segments."""

    flow: LimitedFlow

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        responded: Callable[[int], None],
        refused: Refused,
        turns: Turns,
        places: Places,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        prefix: str = "",
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.app = partial(self._serve, self.app)
        self.ws_protocol_class = None  # no endpoint uses WebSocket, and its parser has no limits
        self.timeout_keep_alive = NEVER_SECONDS  # `_await_request` limits it
        self._responded, self._refused, self._limits = responded, refused, limits
        self._turns, self._places, self._prefix = turns, places, prefix
        self.url, self.headers = b"", []  # of the request that is being parsed, as far as they have arrived
        self._probes_only = False  # this connection has a reserved place
        self.since, self.waiting, self.accepted = 0.0, True, False  # for `Places`
        self._framer = Framer()
        self._unread, self._position = b"", 0  # received; parsed up to `_position`
        # `cycle` is the newest request, which may wait in the pipeline.
        self._running: RequestResponseCycle | None = None
        self._receiving: RequestResponseCycle | None = None  # the one whose body has not ended
        self._finished = False  # if set, nothing that arrives is parsed
        self._closes = False  # after the running response, which began before the body of its request had ended
        self._refusal: RequestError | None = None  # is sent after the responses before it
        self._lingering: asyncio.TimerHandle | None = None
        self._discards = 0  # bytes that may still arrive while it lingers
        self._timer: asyncio.TimerHandle | None = None  # for a request; while one is being served there is no limit
        self._stalled: asyncio.TimerHandle | None = None  # the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = LimitedFlow(transport)
        self.since = self.loop.time()
        place = self._places.take(self, self.loop.time())
        self._probes_only = place is BytePlace.RESERVED
        if place is BytePlace.NONE:
            self.evict()
        else:
            self._await_request()

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def evict(self) -> None:
        self._finished = True
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
        for timer in (self._lingering, self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        if self._running is not None and not self._running.response_complete:
            _disconnect(self._running)
        self._finished, self._unread = True, b""
        super().connection_lost(exc)

    # Time

    def _await_request(self) -> None:
        """From now on the head of the next request has limited time to arrive."""
        self._waits(True)
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.seconds, self._waited)

    def _waits(self, waiting: bool) -> None:
        self.since, self.waiting = self.loop.time(), waiting

    def _waited(self) -> None:
        self._timer = None
        if self.transport.is_closing() or self._finished:
            self.transport.abort()
        elif self._framer.at_start and not self._unread:
            self._close()
        else:
            seconds = f"{self._limits.seconds:g} seconds"
            self._refuse(
                RequestError(f"the request did not arrive within {seconds}", code="request_timeout", status=408)
            )

    def pause_writing(self) -> None:
        """Called when the client has not read so much that no more is sent for now."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._limits.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None and not self.transport.is_closing():
            self._stalled.cancel()
            self._stalled = None

    def _close(self) -> None:
        """Close when what was sent has been read, or after a while."""
        self.transport.close()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._limits.seconds, self.transport.abort)

    # Received data

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if not self._finished:
            self._unread, self._position = self._unread[self._position :] + data, 0
            self._parse()
        elif self._lingering is not None:
            self._discards -= len(data)
            if self._discards < 0:
                self._close()

    def _parse(self) -> None:
        """Parse the received bytes, until the pipeline is full, others have their turn, or nothing more is accepted."""
        if self.flow.behind:
            return
        try:
            segments = 0
            while self._position < len(self._unread) and not self._finished:
                if len(self.pipeline) >= MAX_PIPELINED:
                    self.flow.hold()
                    return
                if segments == SEGMENTS_PER_TURN:
                    self.flow.fall_behind()
                    self._turns.wait(self._go_on)
                    return
                segments += 1
                start = self._position
                self._position = self._framer.next_segment(self._unread, start)
                self.parser.feed_data(self._unread[start : self._position])
        except httptools.HttpParserUpgrade:
            pass  # the upgrade is ignored; `on_headers_complete` made this request the last one
        except (RequestError, httptools.HttpParserError) as error:
            self.logger.debug("closing a connection that sent invalid data", exc_info=error)
            self._refuse(self._framer.failure or RequestError(f"this is not HTTP: {error}", code="invalid_http"))
            return
        self._unread, self._position = b"", 0
        self.flow.held = False  # uvicorn resumes after the next response: requests wait, or reading was not paused

    def _go_on(self) -> None:
        """Parse what waited for this turn, and read on if that was all."""
        self.flow.behind = False
        if not self._finished:
            self._parse()
        if not self.flow.behind and not self.transport.is_closing():
            self.flow.catch_up()

    # Callbacks of the parser

    def on_url(self, url: bytes) -> None:
        self._framer.target_received()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._framer.section is Section.HEAD:  # a trailer must not become a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        headers, upgrade = dict(self.headers), self.parser.should_upgrade()
        length = int(headers[b"content-length"]) if b"content-length" in headers else None
        self._framer.head_ended(length, chunked=b"transfer-encoding" in headers, upgrade=upgrade)
        try:
            check_host(self.parser.get_http_version(), self.headers)
            check_codings(self.headers)
        except RequestError as error:
            raise self._framer.failed(error) from None
        self.url = origin_form(self.url, self.headers)
        if self._probes_only and self._known_scope()["path"] not in OPEN_PATHS:
            raise self._framer.failed(
                RequestError(
                    f"the server has {self._limits.connections} connections, which is its limit; retry later",
                    code="too_many_connections",
                    status=503,
                )
            )
        super().on_headers_complete()
        self._waits(False)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._receiving = self.cycle
        if not self.pipeline:
            self._running = self.cycle
        if upgrade or self._probes_only:
            self.cycle.keep_alive = False  # the bytes after an upgrade are not HTTP/1.1; a reserved place is for others

    def on_chunk_header(self) -> None:
        self._framer.chunk_line_ended()

    def on_body(self, body: bytes) -> None:
        self._framer.body_received(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._framer.message_ended()
        super().on_message_complete()
        self.url, self.headers = b"", []
        self._receiving = None
        self._finished = self._closes or not self.cycle.keep_alive

    # Responses

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application. If it responds before the body has ended, the connection closes after the response: the
        rest would be parsed for nobody."""

        async def announced(message: Message) -> None:
            cycle = self._receiving
            if message["type"] != "http.response.start" or cycle is None or cycle.scope is not scope:
                await send(message)
                return
            self._closes = True
            cycle.keep_alive = False
            await send(message)  # with "connection: close"
            cycle.keep_alive = True  # uvicorn would close at once, and the client might never read the response

        scope["srv.accepted"] = self._accept
        await app(scope, receive, announced)

    def _accept(self) -> None:
        """Called when a request of a client has been accepted: with a valid key, if the server needs one."""
        self.accepted = True

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
            return
        if self._closes:
            self._linger(UNREAD_BODY_BYTES)
            return
        self._running = following
        if following is None:
            self._await_request()
        if self._refusal is None:
            self._parse()
        elif following is None:
            self._send_refusal(self._refusal)

    def _refuse(self, error: RequestError) -> None:
        """Send the error after the responses of earlier requests, and close."""
        self._finished, self._unread, self._position = True, b"", 0
        invalid = self._receiving
        if invalid is not None and (invalid.response_started or invalid.disconnected):
            self._close()  # it has a response already
            return
        if invalid is not None and invalid is self._running:
            _disconnect(invalid)  # the application waits for its body
            self._running = None
        elif invalid is not None:
            self.pipeline.popleft()
        if self._running is None or self._running.response_complete:
            self._send_refusal(error)
        else:
            self._refusal = error
            self.flow.hold()

    def _send_refusal(self, error: RequestError) -> None:
        status, body = describe(error)
        scope = self._known_scope()
        response = error_response(status, body, {"connection": "close", HEADER: id_of(scope)}, scope)
        headers = [*self.server_state.default_headers, *response.raw_headers]
        lines = [b"%s: %s\r\n" % (name, value) for name, value in headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(response.body)]))
        self._responded(status)
        self._refused(status, body)
        self._linger(LINGER_BYTES)

    def _known_scope(self) -> Scope:
        """What is known of the request that is being parsed, and on which an error depends."""
        try:
            path = httptools.parse_url(self.url).path or b""
        except httptools.HttpParserError:  # nothing of a target has arrived, or it is not one
            path = b""
        return {
            "type": "http",
            "path": without_prefix(self._prefix, unquote(path.decode("latin-1"))),
            "headers": self.headers,
        }

    def _linger(self, discards: int) -> None:
        """Read this many bytes more, for a while, before closing: unread ones could cost the client the response."""
        self._finished, self._unread, self._position = True, b"", 0
        self._discards = discards
        self._waits(True)  # this connection may lose its place
        self._lingering = self.loop.call_later(LINGER_SECONDS, self._close)
        self.flow.held = False
        self.flow.resume_reading()


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Signal to the application that the client has disconnected; what it still sends is discarded."""
    cycle.disconnected = True
    cycle.message_event.set()
