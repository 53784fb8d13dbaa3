"""Who may call which path: keys, and requests that web pages make a browser send to this machine."""

from __future__ import annotations

import pytest
from every import every
from server_support import serving

from srv.server.access import Access

pytestmark = pytest.mark.anyio
LOCAL = Access(loopback=True)


async def status(access: Access, method: str, path: str, **headers: str) -> tuple[int, str]:
    async with serving(access=access) as server:
        content = b'{"prompt": "a", "max_tokens": 1}' if path == "/v1/completions" else b""
        response = await server.http.request(method, path, headers=headers, content=content)
        return response.status_code, "" if response.is_success else response.json()["error"]["code"]


@every(
    ("access", "headers", "expected"),
    [
        (LOCAL, {"host": "localhost:30000"}, (200, "")),
        (LOCAL, {"host": "127.0.0.2"}, (200, "")),
        (LOCAL, {"host": "[::1]:30000"}, (200, "")),
        (LOCAL, {"host": "evil.example:30000"}, (403, "host_not_allowed")),
        (LOCAL, {"host": "127.0.0.1.evil.example"}, (403, "host_not_allowed")),
        (LOCAL, {"host": "localhost", "origin": "https://evil.example"}, (403, "origin_not_allowed")),
        (LOCAL, {"host": "localhost", "origin": "null"}, (403, "origin_not_allowed")),
        (LOCAL, {"host": "localhost", "origin": "http://["}, (403, "origin_not_allowed")),
        (Access(), {"host": "public.example", "origin": "http://["}, (200, "")),
        (LOCAL, {"host": "localhost", "origin": "http://localhost:3000"}, (200, "")),
        (Access(loopback=True, hosts=("My.Host",)), {"host": "my.host:1"}, (200, "")),
        (Access(loopback=True, hosts=("*",)), {"host": "any.example"}, (200, "")),
        (Access(loopback=True, origins=("https://a.example",)),
         {"host": "localhost", "origin": "https://a.example"}, (200, "")),
        (Access(loopback=True, origins=("https://a.example",)),
         {"host": "localhost", "origin": "https://a.example.evil"}, (403, "origin_not_allowed")),
        (Access(loopback=True, origins=("*",)), {"host": "localhost", "origin": "null"}, (200, "")),
        (Access(), {"host": "public.example", "origin": "https://b.example"}, (200, "")),
        (Access(hosts=("public.example",)), {"host": "other.example"}, (403, "host_not_allowed")),
    ],
)  # fmt: skip
async def test_requests_of_web_pages(access: Access, headers: dict[str, str], expected: tuple[int, str]) -> None:
    assert await status(access, "POST", "/v1/completions", **headers) == expected


async def test_requests_that_only_read_are_not_checked() -> None:
    for path in ("/health", "/v1/models"):
        assert await status(LOCAL, "GET", path, host="evil.example", origin="https://evil.example") == (200, "")


@every(
    ("path", "key", "expected"),
    [
        ("/flush_cache", "admin", 200),
        ("/flush_cache", "user", 401),
        ("/flush_cache", None, 401),
        ("/v1/completions", "user", 200),
        ("/v1/completions", "admin", 200),
        ("/v1/completions", "other", 401),
    ],
)
async def test_an_admin_key_is_needed_for_the_paths_of_operators(path: str, key: str | None, expected: int) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    assert (await status(Access(key="user", admin_key="admin"), "POST", path, **headers))[0] == expected


async def test_an_admin_key_alone_leaves_the_other_paths_open() -> None:
    access = Access(admin_key="admin")
    assert (await status(access, "POST", "/v1/completions"))[0] == 200
    assert (await status(access, "GET", "/get_server_info"))[0] == 401
