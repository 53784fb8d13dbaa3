"""What RFC 9112 requires of the head of a request beyond its syntax: one valid host, and a known transfer coding.

Must not know which hosts may call (`srv.server.http.access`).
"""

from __future__ import annotations

import re

import httptools

from srv.errors import RequestError

# RFC 3986: an address in brackets, or a name, which may be empty; then perhaps a port.
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?")
Headers = list[tuple[bytes, bytes]]


def check_host(version: str, headers: Headers) -> None:
    """`headers`: with names in lower case. Raises RequestError (400)."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _bad_host(f"has {len(hosts) or 'no'} Host headers; send one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        shown = ascii(hosts[0][:80].decode("latin-1"))
        raise _bad_host(f"has Host {shown}, which is no host; send the name or address of the server")


def _bad_host(problem: str) -> RequestError:
    return RequestError(f"the request {problem}", code="invalid_host")


def check_codings(headers: Headers) -> None:
    """Raises RequestError (501) for another transfer coding than chunked, once."""
    codings = b",".join(value for name, value in headers if name == b"transfer-encoding")
    names = [name for part in codings.split(b",") if (name := part.strip(b" \t").lower())]
    if names not in ([], [b"chunked"]):
        raise RequestError(
            f"Transfer-Encoding {codings[:80].decode('latin-1')!a} is not implemented; send chunked alone,"
            " and compress with Content-Encoding",
            code="unsupported_transfer_encoding",
            status=501,
        )


def origin_form(target: bytes, headers: Headers) -> bytes:
    """The target without the scheme and the host of a whole URL, which replaces the one of `headers`, in place
    (RFC 9112, 3.2.2)."""
    if target[:1] in (b"/", b"*"):
        return target
    url = httptools.parse_url(target)  # its error is that of a request that is no HTTP
    host = b"[%s]" % url.host if b":" in url.host else url.host
    authority = host if url.port is None else b"%s:%d" % (host, url.port)
    headers[:] = [*((name, value) for name, value in headers if name != b"host"), (b"host", authority)]
    return (url.path or b"/") + (b"" if url.query is None else b"?" + url.query)
