"""Reads request bodies: checks their sizes while reading, and decodes JSON without delaying other streams.

Owns everything from the bytes to the decoded JSON value. Must not know any schema.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from srv.errors import RequestError
from srv.grammar.written import written_float
from srv.server.http.encoding import decompress

INLINE_BYTES = 16 * 1024  # parsed on the event loop, which takes well under a millisecond
LINGER_SECONDS = 2.0  # how long the rest of a refused body is read, so that the client receives the response
VALUES_PER_CONTAINER = 16  # decoding an array or object takes about as long as this many numbers
BACKSLASH = ord("\\")
MAX_KEY_BYTES = 200  # bytes before an invalid value that are searched for its key
_BYTE_OFFSET = re.compile(r"\(byte (\d+)\)")
_NON_FINITE = re.compile(rb"NaN|Infinity")
_KEY_BEFORE = re.compile(rb'"([^"\\]+)"\s*:\s*-?$')
_LISTING = (b'"const"', b'"enum"')  # keywords of schemas that list values
_WITH_TEXTS = msgspec.json.Decoder(float_hook=written_float)
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`values`: JSON values per body; a container counts as 16. `seconds`: time for the body to arrive."""

    bytes: int = 8 * 1024 * 1024
    values: int = 131_072
    seconds: float = 60.0


DEFAULT_BODY_LIMITS = BodyLimits()


class HeldBodies:
    """Counts the bytes of the bodies of all requests that have no response yet, and refuses more than `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def share(self) -> HeldShare:
        return HeldShare(self)

    def take(self, size: int) -> None:
        if self.held + size > self._limit:
            raise RequestError(
                f"the server holds {self.held} bytes of request bodies, the limit is {self._limit}; retry later",
                code="too_many_bytes_held",
                status=503,
            )
        self.held += size


class HeldShare:
    """What one request holds of `HeldBodies`."""

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies, self._size = bodies, 0

    def take(self, size: int) -> None:
        """Raises RequestError (503) if all requests together would hold too much."""
        self._bodies.take(size)
        self._size += size

    def release(self) -> None:
        self._bodies.held -= self._size
        self._size = 0


async def read_json(request: Request, limits: BodyLimits, share: HeldShare) -> object:
    """Read and decode a JSON body. Raises RequestError: 400, 408, 413, 415 or 503.

    share: the bytes of the body are added to it as they arrive; the caller releases it.
    """
    body = await read_bytes(request, limits, share)
    if encoding := request.headers.get("content-encoding"):
        size = len(body)
        body = await asyncio.to_thread(decompress, body, encoding, limits.bytes)
        share.take(max(0, len(body) - size))
    if len(body) <= INLINE_BYTES:
        return parse(body, limits)
    return await asyncio.to_thread(parse, body, limits)


async def read_bytes(request: Request, limits: BodyLimits, share: HeldShare) -> bytes:
    """Read the body. Raises RequestError: 413 as soon as it is too large, 408 if it does not arrive in time."""
    declared = request.headers.get("content-length", "")
    stream = request.stream()
    chunks: list[bytes] = []
    size = int(declared) if declared.isdigit() and int(declared) > limits.bytes else 0
    try:
        async with asyncio.timeout(limits.seconds):
            while size <= limits.bytes and (chunk := await anext(stream, None)) is not None:
                size += len(chunk)
                share.take(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {limits.seconds:g} seconds", code="request_timeout", status=408
        ) from None
    if size <= limits.bytes:
        return b"".join(chunks)
    chunks.clear()
    await _discard(stream)
    shown = declared if declared.isdigit() else f"more than {limits.bytes}"
    raise RequestError(
        f"the body has {shown} bytes, the limit is {limits.bytes}; send a smaller one",
        code="body_too_large",
        status=413,
    )


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Read on for a while: closing the connection while the client is sending could lose the response."""
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            async for _ in stream:
                pass
    except TimeoutError:
        return  # the rest is discarded


def parse(body: bytes, limits: BodyLimits) -> object:
    """Decode JSON (RFC 8259: no NaN, no Infinity, UTF-8, no lone surrogates). Raises RequestError (400)."""
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object", code="invalid_json")
    if len(body) > INLINE_BYTES:
        _check_value_count(body, limits)
    try:
        value = msgspec.json.decode(body)
        # Only numbers in schemas keep their text: no other body is decoded twice.
        return _WITH_TEXTS.decode(body) if any(name in body for name in _LISTING) else value
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: {error.reason}; encode it as UTF-8", code="invalid_utf8"
        ) from None
    except RecursionError:
        raise RequestError("the JSON body is nested too deeply", code="invalid_json") from None
    except msgspec.MsgspecError as error:
        raise _invalid_json(body, str(error)) from None


def _invalid_json(body: bytes, message: str) -> RequestError:
    """The error for invalid JSON, with a clearer message where the decoder's own is misleading."""
    if (offset := _BYTE_OFFSET.search(message)) and (literal := _NON_FINITE.match(body, int(offset[1]))):
        sign = "-" if body[: int(offset[1])].endswith(b"-") else ""
        key = _KEY_BEFORE.search(body, max(0, int(offset[1]) - MAX_KEY_BYTES), int(offset[1]))
        name = key[1].decode(errors="replace") if key else None
        shown = f"{sign}{literal[0].decode()}"
        return RequestError(
            f"{name or 'a value'} = {shown} is refused: JSON allows only finite numbers; send one",
            code="invalid_json",
            param=name,
        )
    if "out of range" in message:
        message = "it contains a number out of range (64 bits)"
    elif _LONE_SURROGATE.search(body) and ("truncated" in message or "surrogate" in message):
        message = "it contains a lone surrogate (an escape \\ud800-\\udfff)"
    return RequestError(f"the body cannot be read as JSON: {message}", code="invalid_json")


def _check_value_count(body: bytes, limits: BodyLimits) -> None:
    """Refuse bodies whose decoding would hold the GIL for long: the time depends on the values, not on the bytes.

    Counts commas and opening brackets outside strings, in small steps so that other threads can run.
    """
    values, position, size = 0, 0, len(body)
    while position < size:
        quote = body.find(b'"', position, position + INLINE_BYTES)
        end = quote if quote >= 0 else min(position + INLINE_BYTES, size)
        containers = body.count(b"[", position, end) + body.count(b"{", position, end)
        values += body.count(b",", position, end) + VALUES_PER_CONTAINER * containers
        if values > limits.values:
            raise RequestError(
                f"the body has more than {limits.values} JSON values, where an array or object counts"
                f" as {VALUES_PER_CONTAINER}; split it into several requests",
                code="too_many_values",
            )
        position = end if quote < 0 else _end_of_string(body, quote)


def _end_of_string(body: bytes, start: int) -> int:
    """The offset after the closing quote, or the end of the body if there is none (the decoder reports that)."""
    quote = start
    while (quote := body.find(b'"', quote + 1)) >= 0:
        before = quote - 1
        while body[before] == BACKSLASH:
            before -= 1
        if (quote - before) % 2 == 1:  # an even number of backslashes: the quote is not escaped
            return quote + 1
    return len(body)
