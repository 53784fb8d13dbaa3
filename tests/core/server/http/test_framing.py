"""The framer in front of the real parser: its limits, and that it does not change the result of the parser."""

from __future__ import annotations

from collections.abc import Iterable

import httptools
import pytest

from srv.errors import RequestError
from srv.server.http.framing import MAX_SECTION_BYTES, MAX_SECTION_LINES, Framer

GET = b"GET /a?b=c HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LIMIT = MAX_SECTION_BYTES


class RecordingParser:
    """A parser that records its events, with or without a framer in front of it."""

    def __init__(self, framer: Framer | None) -> None:
        self.requests: list[dict[str, object]] = []
        self.ended = self.fed = 0
        self.error: str | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.framer = framer
        self.headers: list[tuple[bytes, bytes]] = []

    def on_message_begin(self) -> None:
        self.headers = []
        self.requests.append({"url": b"", "body": b"", "headers": self.headers, "ended": False})

    def on_url(self, url: bytes) -> None:
        if self.framer:
            self.framer.target_received()
        self.requests[-1]["url"] += url  # type: ignore[operator]

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.framer:
            headers = dict(self.headers)
            length = int(headers[b"content-length"]) if b"content-length" in headers else None
            upgrade = self.parser.should_upgrade()
            self.framer.head_ended(length, chunked=b"transfer-encoding" in headers, upgrade=upgrade)

    def on_chunk_header(self) -> None:
        if self.framer:
            self.framer.chunk_line_ended()

    def on_body(self, body: bytes) -> None:
        if self.framer:
            self.framer.body_received(len(body))
        self.requests[-1]["body"] += body  # type: ignore[operator]

    def on_message_complete(self) -> None:
        if self.framer:
            self.framer.message_ended()
        self.requests[-1]["ended"] = True
        self.ended += 1

    def feed(self, data: bytes) -> None:
        if self.error is None:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                self.error = "upgrade"
            except httptools.HttpParserError as error:
                self.error = str(error)


def parsed(data: bytes) -> RecordingParser:
    recorder = RecordingParser(None)
    recorder.feed(data)
    return recorder


def framed(arrivals: Iterable[bytes]) -> RecordingParser:
    framer = Framer()
    recorder = RecordingParser(framer)
    for data in arrivals:
        position = 0
        while position < len(data) and recorder.error is None:
            try:
                end = framer.next_segment(data, position)
            except RequestError as error:
                recorder.error = error.code
                break
            ended = recorder.ended
            recorder.feed(data[position:end])
            recorder.fed += end - position
            assert recorder.ended - ended <= 1, data[position:end]
            position = end
    return recorder


STREAMS = [
    GET * 3,
    b"\r\n\n" + GET,
    POST + b"Content-Length: 5\r\n\r\na\nb\r\n" + GET,
    POST + b"Content-Length: 0\r\n\r\n" + GET,
    POST + b"Content-Length:  05 \r\nExpect: 100-continue\r\n\r\nabcde" + GET,
    CHUNKED + b'3;a=b;c="d e"\r\na\nb\r\n0a\r\n' + b"\r\n" * 5 + b"\r\n0\r\n\r\n" + GET,
    CHUNKED + b"1\r\na\r\n000;x\r\nA: b\r\nContent-Type: x\r\n\r\n" + GET,
    POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n" + GET,
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n" + GET,
    # Refused by the parser.
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/1.1\r\nHost: x\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nA : b\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nA: b\rC: d\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\n A: b\r\n\r\n" + GET,
    POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab" + GET,
    POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nab" + GET,
    POST + b"Content-Length: 2, 2\r\n\r\nab" + GET,
    POST + b"Content-Length: +2\r\n\r\nab" + GET,
    POST + b"Content-Length: 1\r\n 2\r\n\r\nab" + GET,
    POST + b"Content-Length: 99999999999999999999\r\n\r\nab" + GET,
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + GET,
    POST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n" + GET,
    POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n" + GET,
    CHUNKED + b"1\na\r\n0\r\n\r\n" + GET,
    CHUNKED + b"1 \r\na\r\n0\r\n\r\n" + GET,
    CHUNKED + b"0x1\r\na\r\n0\r\n\r\n" + GET,
    CHUNKED + b"1_0\r\na\r\n0\r\n\r\n" + GET,
    CHUNKED + b"1\r\nab\r\n0\r\n\r\n" + GET,
    CHUNKED + b"1\r\na\n0\r\n\r\n" + GET,
    CHUNKED + b"fffffffffffffffff\r\na\r\n" + GET,
    CHUNKED + b'1;a="\r\n"\r\na\r\n0\r\n\r\n' + GET,
    CHUNKED + b"0\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" + GET,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


def test_the_result_does_not_depend_on_how_the_bytes_arrive() -> None:
    """Each stream is split once at every position, and into bytes. Malformed ones end with the parser's own error."""
    faults = []
    for stream in STREAMS:
        expected = parsed(stream)
        arrivals = [[stream[:position], stream[position:]] for position in range(len(stream))]
        arrivals.append([stream[position : position + 1] for position in range(len(stream))])
        for parts in arrivals:
            recorder = framed(parts)
            if (recorder.requests, recorder.error) != (expected.requests, expected.error):
                faults.append((parts, recorder.requests, recorder.error, expected.requests, expected.error))
    assert not faults


ENDLESS = {  # before, endless part, bytes of `before` in the same section, error code
    "a URL": (b"GET /", b"a", 5, "url_too_long"),
    "a URL that is not the first": (GET + b"GET /", b"a", 5, "url_too_long"),
    "a query": (b"GET /?", b"a", 6, "url_too_long"),
    "a header name": (b"GET / HTTP/1.1\r\n", b"a", 16, "headers_too_large"),
    "a header value": (b"GET / HTTP/1.1\r\nA: ", b"a", 19, "headers_too_large"),
    "a header value after a body": (
        POST + b"Content-Length: 3\r\n\r\nabc" + POST + b"A: ",
        b"a",
        20,
        "headers_too_large",
    ),
    "spaces before a value": (b"GET / HTTP/1.1\r\nA:", b" ", 18, "headers_too_large"),
    "long headers": (b"GET / HTTP/1.1\r\n", b"A: " + b"a" * 1000 + b"\r\n", 16, "headers_too_large"),
    "a trailer": (CHUNKED + b"0\r\nA: ", b"a", 3, "trailers_too_large"),
    "long trailers": (CHUNKED + b"0\r\n", b"A: " + b"a" * 1000 + b"\r\n", 0, "trailers_too_large"),
    "an extension of the first chunk": (CHUNKED + b"1;a=", b"a", 4, "chunk_header_too_large"),
    "an extension of the last chunk": (CHUNKED + b"1\r\na\r\n0;a", b"a", 5, "chunk_header_too_large"),
    "a chunk size of zeros": (CHUNKED, b"0", 0, "chunk_header_too_large"),
}


def test_the_parser_receives_a_section_up_to_its_limit() -> None:
    faults = []
    for name, (before, endless, within, code) in ENDLESS.items():
        stream = before + endless * (3 * LIMIT // len(endless))
        for step in (9, 1000, LIMIT, len(stream)):
            recorder = framed(stream[position : position + step] for position in range(0, len(stream), step))
            expected = (code, len(before) - within + LIMIT)
            if (recorder.error, recorder.fed) != expected:
                faults.append((name, step, recorder.error, recorder.fed, expected))
    assert not faults


def test_the_number_of_lines_of_a_section_is_limited() -> None:
    faults = []
    for name, before, lines, line, code in (
        ("empty lines", b"", 0, b"\r\n", "headers_too_large"),
        ("headers", b"GET / HTTP/1.1\r\n", 1, b"a:\r\n", "headers_too_large"),
        ("trailers", CHUNKED + b"0\r\n", 0, b"a:\r\n", "trailers_too_large"),
    ):
        recorder = framed([before + line * 10_000])
        expected = len(before) + (MAX_SECTION_LINES - lines) * len(line)
        if (recorder.error, recorder.fed) != (code, expected):
            faults.append((name, recorder.error, recorder.fed, expected))
    assert not faults


def test_sections_at_the_limit_are_parsed_and_counted_separately() -> None:
    head = b"POST /%s HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    full = head % (b"a" * (LIMIT - len(head) + 2))
    chunks = b"2;%s\r\n" % (b"a" * (LIMIT - 4)) + b"\n\n\r\n" + b"2\r\n\n\n\r\n" + b"0\r\n"
    trailers = b"A: %s\r\n\r\n" % (b"a" * (LIMIT - 7))
    many = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (MAX_SECTION_LINES - 2) + b"\r\n"
    recorder = framed([(full + chunks + trailers + many) * 3])
    assert (recorder.error, recorder.ended, len(full)) == (None, 6, LIMIT)
    assert [len(request["body"]) for request in recorder.requests] == [4, 0] * 3  # type: ignore[arg-type]


def test_a_body_length_that_differs_from_the_parser_is_refused() -> None:
    """No known parser does this; if one did, the bytes after it must not be parsed as another request."""
    longer, shorter, unannounced = Framer(), Framer(), Framer()
    longer.head_ended(3, chunked=False, upgrade=False)
    with pytest.raises(RequestError, match="ambiguous"):
        longer.body_received(4)
    shorter.head_ended(3, chunked=False, upgrade=False)
    shorter.body_received(2)
    with pytest.raises(RequestError, match="ambiguous"):
        shorter.message_ended()
    unannounced.head_ended(None, chunked=False, upgrade=False)
    with pytest.raises(RequestError, match="ambiguous") as caught:
        unannounced.body_received(1)
    assert unannounced.failure is caught.value


def test_a_body_with_an_upgrade_is_refused_because_the_parser_does_not_read_it() -> None:
    upgrade = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    for head in (b"Content-Length: 3\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"):
        recorder = framed([upgrade + head + GET])
        assert recorder.framer is not None
        assert recorder.framer.failure is not None
        assert (recorder.framer.failure.code, recorder.ended) == ("upgrade_with_body", 0)
    assert framed([upgrade + b"Content-Length: 0\r\n\r\n"]).error == "upgrade"
