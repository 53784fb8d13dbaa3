"""Splits the bytes of a connection into segments for the HTTP parser, which limits the size of heads and trailers.

Owns the byte counts and their limits. Must not know sockets or requests, and does not parse HTTP: only the parser
decides where a request ends, and its callbacks update the state here.

    HEAD ──► BODY (Content-Length) ────────────────────────► HEAD
      └────► CHUNK_LINE ──► BODY (the data of one chunk) ─┐
               ▲   └──────► TRAILERS ────────────────────────► HEAD
               └──────────────────────────────────────────┘

No segment crosses the end of a section. Outside bodies a segment is at most one line, and sections end at line ends;
within a body it is at most the rest of the declared length. The byte count of a section is therefore exact, and a
caller can stop between two requests.
"""

from __future__ import annotations

from enum import Enum

from srv.errors import RequestError

MAX_SECTION_BYTES = 64 * 1024  # per head, trailer section, or chunk header line
MAX_SECTION_LINES = 256  # even a short header takes hundreds of bytes of memory
# A chunk costs the same whatever its size: all but so many chunks of a body must have so many bytes on average.
FREE_CHUNKS, MIN_CHUNK_BYTES = 8192, 64


class Section(Enum):
    """The section that the next byte of a connection belongs to."""

    HEAD = "head"
    BODY = "body"
    CHUNK_LINE = "chunk line"
    TRAILERS = "trailers"


class Framer:
    """The parse position of one connection.

    The caller gets each segment from `next_segment` and feeds it to the parser, whose callbacks call the other methods.
    All of them raise RequestError, after which the connection cannot be read any further. The parser replaces errors of
    its callbacks with its own, so `failure` stores them.
    """

    def __init__(self) -> None:
        self.failure: RequestError | None = None
        self._chunks = self._chunk_bytes = 0  # of this body, as declared
        self._enter(Section.HEAD)

    def _enter(self, section: Section, left: int = 0, *, chunked: bool = False) -> None:
        self.section = section
        self._left = left  # bytes of this body or chunk that have not arrived
        self._chunked = chunked
        self._bytes = self._lines = 0  # of this section, passed to the parser so far
        self._chunk_line = bytearray()  # size and extensions, after the line end of the previous chunk
        self._ends_line = False  # whether the last segment did
        self._in_target = False

    @property
    def at_start(self) -> bool:
        """Whether no byte of the next request has been passed to the parser."""
        return self.section is Section.HEAD and self._bytes == 0

    def next_segment(self, data: bytes, start: int) -> int:
        """The end of the segment of `data` that begins at `start`. Raises RequestError: 400, 414 or 431."""
        if self._left:
            return min(len(data), start + self._left)
        allowed = MAX_SECTION_BYTES - self._bytes
        if allowed == 0 or self._lines == MAX_SECTION_LINES:
            raise self.failed(self._too_large())
        end = data.find(b"\n", start, start + allowed) + 1
        self._ends_line = end > 0
        if self._ends_line:
            self._lines += 1
            self._in_target = False
        else:
            end = min(len(data), start + allowed)
        self._bytes += end - start
        if self.section is Section.CHUNK_LINE:
            self._chunk_line += data[start:end]
        return end

    def _too_large(self) -> RequestError:
        too_many = self._lines == MAX_SECTION_LINES
        size = f"more than {MAX_SECTION_LINES} lines" if too_many else f"more than {MAX_SECTION_BYTES} bytes"
        if self.section is Section.CHUNK_LINE:
            return RequestError(
                f"a chunk header has {size}; send chunks without extensions", code="chunk_header_too_large"
            )
        if self.section is Section.TRAILERS:
            return RequestError(
                f"the trailers have {size}; omit them, they are ignored", code="trailers_too_large", status=431
            )
        if self._in_target:
            return RequestError(f"the URL has {size}; send long values in the body", code="url_too_long", status=414)
        return RequestError(
            f"the request head has {size}; send fewer or shorter headers", code="headers_too_large", status=431
        )

    def failed(self, error: RequestError) -> RequestError:
        """Note why the connection cannot be read any further; the caller raises it."""
        self.failure = error
        return error

    def target_received(self) -> None:
        """The segment that is being parsed contains a part of the request target."""
        self._in_target = not self._ends_line

    def head_ended(self, content_length: int | None, *, chunked: bool, upgrade: bool) -> None:
        """The end of a head with these headers. `upgrade`: the parser expects another protocol after it."""
        if upgrade and (content_length or chunked):
            raise self.failed(
                RequestError(
                    "a request with a body and an Upgrade header is refused; send it as plain HTTP/1.1",
                    code="upgrade_with_body",
                )
            )
        if chunked:
            self._chunks = self._chunk_bytes = 0
            self._enter(Section.CHUNK_LINE)
        else:
            self._enter(Section.BODY, content_length or 0)

    def chunk_line_ended(self) -> None:
        size = int(self._chunk_line.partition(b";")[0], 16)  # the parser has checked that it is hexadecimal
        self._count_chunk(size)
        if size:
            self._enter(Section.BODY, size, chunked=True)
        else:
            self._enter(Section.TRAILERS)

    def _count_chunk(self, size: int) -> None:
        self._chunks += size > 0
        self._chunk_bytes += size
        if self._chunk_bytes < (self._chunks - FREE_CHUNKS) * MIN_CHUNK_BYTES:
            raise self.failed(
                RequestError(
                    f"the body has {self._chunk_bytes} bytes in more than {FREE_CHUNKS} chunks; send chunks of at least"
                    f" {MIN_CHUNK_BYTES} bytes, or a Content-Length",
                    code="chunks_too_small",
                )
            )

    def body_received(self, size: int) -> None:
        """The parser has passed on `size` bytes of body."""
        if size > self._left:
            raise self._ambiguous_length()
        self._left -= size
        if self._chunked and not self._left:
            self._enter(Section.CHUNK_LINE)

    def message_ended(self) -> None:
        if self._left:
            raise self._ambiguous_length()
        self._enter(Section.HEAD)

    def _ambiguous_length(self) -> RequestError:
        """The parser disagrees about the length: the bytes that follow could be misread as another request."""
        return self.failed(
            RequestError("the length of the body is ambiguous; send a single Content-Length", code="invalid_http")
        )
