"""The framer in front of the real parser: its limits, and that it does not change what the parser reads."""

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


class Read:
    """The events of the parser, with or without a framer in front of it."""

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


def parsed(data: bytes) -> Read:
    read = Read(None)
    read.feed(data)
    return read


def framed(arrivals: Iterable[bytes]) -> Read:
    framer = Framer()
    read = Read(framer)
    for data in arrivals:
        position = 0
        while position < len(data) and read.error is None:
            try:
                end = framer.next_piece(data, position)
            except RequestError as error:
                read.error = error.code
                break
            ended = read.ended
            read.feed(data[position:end])
            read.fed += end - position
            assert read.ended - ended <= 1, data[position:end]
            position = end
    return read


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
    # What the parser refuses.
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


def test_the_parser_reads_the_same_however_the_bytes_arrive() -> None:
    """Split once, at every position, and byte by byte. Malformed streams end with the parser's own error."""
    faults = []
    for stream in STREAMS:
        expected = parsed(stream)
        arrivals = [[stream[:place], stream[place:]] for place in range(len(stream))]
        arrivals.append([stream[place : place + 1] for place in range(len(stream))])
        for parts in arrivals:
            read = framed(parts)
            if (read.requests, read.error) != (expected.requests, expected.error):
                faults.append((parts, read.requests, read.error, expected.requests, expected.error))
    assert not faults


ENDLESS = {  # what comes before, what has no end, the bytes of `before` in the same section, the refusal
    "a URL": (b"GET /", b"a", 5, "url_too_long"),
    "a URL that is not the first": (GET + b"GET /", b"a", 5, "url_too_long"),
    "a query": (b"GET /?", b"a", 6, "url_too_long"),
    "a header name": (b"GET / HTTP/1.1\r\n", b"a", 16, "headers_too_large"),
    "a header value": (b"GET / HTTP/1.1\r\nA: ", b"a", 19, "headers_too_large"),
    "a header value behind a body": (
        POST + b"Content-Length: 3\r\n\r\nabc" + POST + b"A: ",
        b"a",
        20,
        "headers_too_large",
    ),
    "spaces in front of a value": (b"GET / HTTP/1.1\r\nA:", b" ", 18, "headers_too_large"),
    "long headers": (b"GET / HTTP/1.1\r\n", b"A: " + b"a" * 1000 + b"\r\n", 16, "headers_too_large"),
    "a trailer": (CHUNKED + b"0\r\nA: ", b"a", 3, "trailers_too_large"),
    "long trailers": (CHUNKED + b"0\r\n", b"A: " + b"a" * 1000 + b"\r\n", 0, "trailers_too_large"),
    "an extension of the first chunk": (CHUNKED + b"1;a=", b"a", 4, "chunk_header_too_large"),
    "an extension of the last chunk": (CHUNKED + b"1\r\na\r\n0;a", b"a", 5, "chunk_header_too_large"),
    "a chunk size of zeros": (CHUNKED, b"0", 0, "chunk_header_too_large"),
}


def test_the_parser_is_fed_up_to_the_limit_of_a_section_and_no_further() -> None:
    faults = []
    for name, (before, endless, within, code) in ENDLESS.items():
        stream = before + endless * (3 * LIMIT // len(endless))
        for step in (9, 1000, LIMIT, len(stream)):
            read = framed(stream[place : place + step] for place in range(0, len(stream), step))
            expected = (code, len(before) - within + LIMIT)
            if (read.error, read.fed) != expected:
                faults.append((name, step, read.error, read.fed, expected))
    assert not faults


def test_a_section_of_many_short_lines_is_bounded_by_their_number() -> None:
    faults = []
    for name, before, lines, line, code in (
        ("empty lines", b"", 0, b"\r\n", "headers_too_large"),
        ("headers", b"GET / HTTP/1.1\r\n", 1, b"a:\r\n", "headers_too_large"),
        ("trailers", CHUNKED + b"0\r\n", 0, b"a:\r\n", "trailers_too_large"),
    ):
        read = framed([before + line * 10_000])
        expected = len(before) + (MAX_SECTION_LINES - lines) * len(line)
        if (read.error, read.fed) != (code, expected):
            faults.append((name, read.error, read.fed, expected))
    assert not faults


def test_sections_that_just_fit_are_read_and_the_count_starts_again_with_each() -> None:
    head = b"POST /%s HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    full = head % (b"a" * (LIMIT - len(head) + 2))
    chunks = b"2;%s\r\n" % (b"a" * (LIMIT - 4)) + b"\n\n\r\n" + b"2\r\n\n\n\r\n" + b"0\r\n"
    trailers = b"A: %s\r\n\r\n" % (b"a" * (LIMIT - 7))
    many = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (MAX_SECTION_LINES - 2) + b"\r\n"
    read = framed([(full + chunks + trailers + many) * 3])
    assert (read.error, read.ended, len(full)) == (None, 6, LIMIT)
    assert [len(request["body"]) for request in read.requests] == [4, 0] * 3  # type: ignore[arg-type]


def test_a_body_of_another_length_than_the_parser_reads_is_refused() -> None:
    """No parser does this; if one did, the bytes after it must not be parsed as another request."""
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


def test_a_body_behind_an_upgrade_is_refused_because_the_parser_does_not_read_it() -> None:
    upgrade = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    for head in (b"Content-Length: 3\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"):
        read = framed([upgrade + head + GET])
        assert read.framer is not None
        assert read.framer.failure is not None
        assert (read.framer.failure.code, read.ended) == ("upgrade_with_body", 0)
    assert framed([upgrade + b"Content-Length: 0\r\n\r\n"]).error == "upgrade"
