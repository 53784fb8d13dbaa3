"""What the server requires of a request head beyond its syntax."""

from __future__ import annotations

import asyncio

import pytest
from every import every
from server_support import listening

from srv.errors import RequestError
from srv.server.http.access import Access
from srv.server.http.heads import check_codings, check_host, origin_form

pytestmark = pytest.mark.anyio


def host_refused(version: str, *hosts: bytes) -> bool:
    headers = [(b"accept", b"*"), *((b"host", host) for host in hosts)]
    try:
        check_host(version, headers)
    except RequestError as error:
        return (error.status, error.code) == (400, "invalid_host")
    return False


@every(
    "host", [b"a", b"", b"A-b_c.example:1", b"127.0.0.1:80", b"[::1]", b"[fe80::1]:80", b"a:", b"%41", b"a!$&'()*+,;=~"]
)
def test_valid_hosts(host: bytes) -> None:
    assert not host_refused("1.1", host)
    assert host_refused("1.1", host, host)
    assert host_refused("1.0", host, host)


@every("host", [b"[::1", b"::1", b"a b", b"a/b", b"u@a", b"a:b", b"a:123456", b"\xc3\xbc", b"<a>", b"%4", b"[g]"])
def test_invalid_hosts(host: bytes) -> None:
    assert host_refused("1.1", host)


def test_only_old_versions_need_no_host() -> None:
    assert host_refused("1.1")
    assert not host_refused("1.0")


@every(
    ("codings", "refused"),
    [
        ((), False),
        ((b"chunked",), False),
        ((b" Chunked\t",), False),
        ((b"gzip, chunked",), True),
        ((b"gzip", b"chunked"), True),
        ((b"chunked, chunked",), True),
        ((b"chunked\xa0",), True),
    ],
)
def test_transfer_codings(codings: tuple[bytes, ...], refused: bool) -> None:
    headers = [(b"transfer-encoding", coding) for coding in codings]
    if not refused:
        check_codings(headers)
        return
    with pytest.raises(RequestError, match="not implemented") as caught:
        check_codings(headers)
    assert caught.value.status == 501


@every(
    ("target", "expected", "host"),
    [
        (b"/a?b=c", b"/a?b=c", b"x"),
        (b"*", b"*", b"x"),
        (b"//other/a", b"//other/a", b"x"),
        (b"http://other/a?b=c", b"/a?b=c", b"other"),
        (b"http://user@other:81/", b"/", b"other:81"),
        (b"http://[::1]:81/a", b"/a", b"[::1]:81"),
        (b"http://other", b"/", b"other"),
    ],
)
def test_the_host_of_a_whole_url_counts(target: bytes, expected: bytes, host: bytes) -> None:
    headers = [(b"host", b"x"), (b"a", b"b")]
    assert origin_form(target, headers) == expected
    assert sorted(headers) == [(b"a", b"b"), (b"host", host)]


@every(
    ("head", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET http://localhost/v1/models HTTP/1.1\r\nHost: evil.example\r\n", 200),
        (b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n", 403),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: [::1\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n", 501),
    ],
)
async def test_heads_on_a_connection(head: bytes, status: int) -> None:
    async with listening(access=Access(loopback=True)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http.base_url.port)
        writer.write(head + b"Connection: close\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()
