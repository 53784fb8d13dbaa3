"""Decompresses request bodies (`Content-Encoding`), which may expand a thousandfold. Must not know requests."""

from __future__ import annotations

import zlib

from srv.errors import RequestError

_FORMATS = {"gzip": zlib.MAX_WBITS + 16, "x-gzip": zlib.MAX_WBITS + 16, "deflate": zlib.MAX_WBITS}


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """The body without its `Content-Encoding`, of which at most `limit` bytes are made.

    Raises RequestError: 413 if it is longer, 415 for an unknown or a repeated encoding, 400 if it is damaged.
    """
    names = [name for part in encoding.split(",") if (name := part.strip(" \t").lower()) not in ("", "identity")]
    if not names:
        return body
    if len(names) > 1 or names[0] not in _FORMATS:
        raise RequestError(
            f"Content-Encoding {encoding[:80]} is not supported; send the body as it is, or with gzip or deflate",
            code="unsupported_encoding",
            status=415,
        )
    stream = zlib.decompressobj(_FORMATS[names[0]])
    try:
        content = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise _damaged(names[0], str(error)) from None
    if len(content) > limit:
        raise RequestError(
            f"the decompressed body has more than {limit} bytes, which is the limit; send a smaller one",
            code="body_too_large",
            status=413,
        )
    if not stream.eof:
        raise _damaged(names[0], "it is incomplete")
    if stream.unused_data:
        raise _damaged(names[0], "more data follows")
    return content


def _damaged(name: str, reason: str) -> RequestError:
    return RequestError(f"the body cannot be decompressed as {name}: {reason}", code="invalid_encoding")
