"""Pages of allowed origins can call the server from a browser, and keys arrive in either header."""

from __future__ import annotations

import httpx
import pytest
from every import every
from server_support import serving

from srv.server.http.access import Access
from srv.types import RequestSpec

pytestmark = pytest.mark.anyio
PAGE, EVIL = "https://a.example", "https://evil.example"
BODY = {"prompt": "a", "max_tokens": 1}


async def ask(access: Access, method: str, path: str, **headers: str) -> httpx.Response:
    async with serving(access=access) as server:
        return await server.http.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}, json=BODY
        )


@every(
    ("access", "origin", "allowed"),
    [
        (Access(key="k", origins=(PAGE,)), PAGE, True),
        (Access(key="k", origins=("*",)), EVIL, True),
        (Access(loopback=True), "http://localhost:3000", True),
        (Access(key="k", origins=(PAGE,)), EVIL, False),
        (Access(loopback=True), EVIL, False),
        (Access(), PAGE, False),
    ],
)
async def test_preflights(access: Access, origin: str, allowed: bool) -> None:
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,x-stainless-os"}
    answer = await ask(access, "OPTIONS", "/v1/chat/completions", origin=origin, **asked)
    if allowed:
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "origin" in answer.headers["vary"].lower()
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers


async def test_responses_and_errors_are_readable_for_allowed_origins_only() -> None:
    access = Access(key="k", origins=(PAGE,))
    for origin, key, status in ((PAGE, "k", 200), (PAGE, "wrong", 401), (EVIL, "k", 403)):
        answer = await ask(access, "POST", "/v1/completions", origin=origin, authorization=f"Bearer {key}")
        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == (PAGE if origin == PAGE else None)


async def test_options_without_a_preflight_is_no_method_of_an_endpoint() -> None:
    assert (await ask(Access(), "OPTIONS", "/v1/completions")).status_code == 405


@every(
    ("headers", "status"),
    [
        ({"x_api_key": "k"}, 200),
        ({"x_api_key": "other"}, 401),
        ({"authorization": "Bearer k"}, 200),
        ({"authorization": "Basic k"}, 401),
        ({"authorization": "Bearer other", "x_api_key": "k"}, 200),
        ({}, 401),
    ],
)
async def test_a_key_in_either_header(headers: dict[str, str], status: int) -> None:
    assert (await ask(Access(key="k"), "POST", "/v1/completions", **headers)).status_code == status


async def test_a_key_is_the_same_owner_in_either_header() -> None:
    async with serving() as server:
        for headers in ({"X-Api-Key": "one"}, {"Authorization": "Bearer one"}, {"X-Api-Key": "two"}):
            assert (await server.http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        first, same, other = [message.owner for message in server.engine.received if isinstance(message, RequestSpec)]
        assert first == same != other != ""
