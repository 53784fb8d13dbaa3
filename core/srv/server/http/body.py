"""Reads request bodies: size limit while reading, UTF-8, JSON, and no parse that stalls other streams.

Owns bytes up to the decoded JSON value. Must not know any schema.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from srv.errors import RequestError

INLINE_BYTES = 16 * 1024  # parsed on the event loop: well under a millisecond
LINGER_SECONDS = 2.0  # how long the rest of a refused body is read, so that the client can read our answer
CONTAINER_VALUES = 16  # decoding an array or object takes as long as about this many numbers
BACKSLASH = ord("\\")
LONGEST_KEY = 200  # bytes before a bad value in which its key is looked for
_PLACE = re.compile(r"\(byte (\d+)\)")
_NO_NUMBER = re.compile(rb"NaN|Infinity")
_KEY_BEFORE = re.compile(rb'"([^"\\]+)"\s*:\s*-?$')
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`values`: JSON values in one body, a container counting as 16. `seconds`: for the body to arrive."""

    bytes: int = 8 * 1024 * 1024
    values: int = 131_072
    seconds: float = 60.0


async def read_json(request: Request, limits: BodyLimits) -> object:
    """The decoded JSON body. Raises RequestError: 400, 408 or 413."""
    body = await read_bytes(request, limits)
    if len(body) <= INLINE_BYTES:
        return parse(body, limits)
    return await asyncio.to_thread(parse, body, limits)


async def read_bytes(request: Request, limits: BodyLimits) -> bytes:
    """The body. Raises RequestError: 413 as soon as it is known to be too large, 408 if it does not come."""
    declared = request.headers.get("content-length", "")
    stream = request.stream()
    chunks: list[bytes] = []
    size = int(declared) if declared.isdigit() and int(declared) > limits.bytes else 0
    try:
        async with asyncio.timeout(limits.seconds):
            while size <= limits.bytes and (chunk := await anext(stream, None)) is not None:
                size += len(chunk)
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
        f"the body has {shown} bytes, the limit is {limits.bytes}; send less at a time",
        code="body_too_large",
        status=413,
    )


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Read on for a while: a connection closed while the client still sends would lose our answer."""
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            async for _ in stream:
                pass
    except TimeoutError:
        return  # it has had its time; what it still sends goes nowhere


def parse(body: bytes, limits: BodyLimits) -> object:
    """Decode JSON (RFC 8259: no NaN, no Infinity, UTF-8, no lone surrogates). Raises RequestError (400)."""
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object", code="invalid_json")
    if len(body) > INLINE_BYTES:
        _limit_values(body, limits)
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: {error.reason}; encode it as UTF-8", code="invalid_utf8"
        ) from None
    except RecursionError:
        raise RequestError("the JSON body is nested too deeply", code="invalid_json") from None
    except msgspec.MsgspecError as error:
        raise _unreadable(body, str(error)) from None


def _unreadable(body: bytes, told: str) -> RequestError:
    """The error of a body that is no JSON, in the words of whoever wrote it where the decoder's own mislead."""
    if (place := _PLACE.search(told)) and (word := _NO_NUMBER.match(body, int(place[1]))):
        sign = "-" if body[: int(place[1])].endswith(b"-") else ""
        key = _KEY_BEFORE.search(body, max(0, int(place[1]) - LONGEST_KEY), int(place[1]))
        name = key[1].decode(errors="replace") if key else None
        shown = f"{sign}{word[0].decode()}"
        return RequestError(
            f"{name or 'a value'} = {shown} is refused: JSON has no such number; send a finite one",
            code="invalid_json",
            param=name,
        )
    if "out of range" in told:
        told = "a number in it is out of range (64 bits)"
    elif _LONE_SURROGATE.search(body) and ("truncated" in told or "surrogate" in told):
        told = "a \\ud800-\\udfff escape in it is not half of a pair"
    return RequestError(f"the body cannot be read as JSON: {told}", code="invalid_json")


def _limit_values(body: bytes, limits: BodyLimits) -> None:
    """Refuse bodies whose decoding would block the interpreter for long: time goes with values, not bytes.

    Counts commas and opening brackets outside strings, in small steps that let other threads run.
    """
    values, position, size = 0, 0, len(body)
    while position < size:
        quote = body.find(b'"', position, position + INLINE_BYTES)
        end = quote if quote >= 0 else min(position + INLINE_BYTES, size)
        containers = body.count(b"[", position, end) + body.count(b"{", position, end)
        values += body.count(b",", position, end) + CONTAINER_VALUES * containers
        if values > limits.values:
            raise RequestError(
                f"the body has more than {limits.values} JSON values, an array or object counting as"
                f" {CONTAINER_VALUES}; split it over several requests",
                code="too_many_values",
            )
        position = end if quote < 0 else _end_of_string(body, quote)


def _end_of_string(body: bytes, start: int) -> int:
    """The place after the closing quote; the end of the body if there is none (the decoder will say so)."""
    quote = start
    while (quote := body.find(b'"', quote + 1)) >= 0:
        before = quote - 1
        while body[before] == BACKSLASH:
            before -= 1
        if (quote - before) % 2 == 1:  # an even number of backslashes: the quote is not escaped
            return quote + 1
    return len(body)
