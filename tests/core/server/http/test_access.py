"""Who may call which path: keys, and requests that web pages make a browser send to this machine."""

from __future__ import annotations

import asyncio

import pytest
from every import every
from server_support import eventually, serving

from srv.server.http.access import SHARED_PATHS, Access
from srv.server.http.client_keys import ClientKey
from srv.testing.fake_engine import FakeEngine
from srv.types import RequestSpec

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


@every(
    ("access", "host", "path", "expected"),
    [
        (LOCAL, "evil.example", "/v1/models", 403),
        (LOCAL, "evil.example:30000", "/health", 403),
        (LOCAL, "evil.example", "/", 403),
        (LOCAL, "localhost:30000", "/v1/models", 200),
        (LOCAL, "10.0.0.7:30000", "/v1/models", 403),
        (LOCAL, "10.0.0.7:30000", "/health", 200),
        (Access(hosts=("public.example",)), "evil.example", "/v1/models", 403),
        (Access(hosts=("public.example",)), "evil.example", "/health", 403),
        (Access(hosts=("public.example",)), "[fd00::7]:30000", "/health", 200),
        (Access(hosts=("public.example",)), "public.example", "/v1/models", 200),
        (Access(), "evil.example", "/v1/models", 200),
    ],
)
async def test_requests_that_only_read_are_checked_too(access: Access, host: str, path: str, expected: int) -> None:
    async with serving(access=access) as server:
        assert (await server.http.get(path, headers={"host": host})).status_code == expected


async def test_pages_of_other_hosts_cannot_read() -> None:
    for path in ("/health", "/v1/models"):
        refused = await status(LOCAL, "GET", path, host="localhost", origin="https://evil.example")
        assert refused == (403, "origin_not_allowed")


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


TWO = Access(clients=(ClientKey("one", "first"), ClientKey("zw\u00f6lf", "second", requests_per_minute=1)))
BODY = {"prompt": "a", "max_tokens": 1}


async def test_the_owner_is_the_key_that_was_accepted_not_one_that_was_sent_beside_it() -> None:
    async with serving(access=TWO) as server:
        sent = [
            {"x-api-key": "one"},
            {"authorization": "Bearer EMPTY", "x-api-key": "one"},
            {"authorization": "Bearer one", "x-api-key": "other"},
            {"authorization": "Bearer EMPTY", "x-api-key": "zw\u00f6lf".encode()},
        ]
        for headers in sent:
            response = await server.http.post("/v1/completions", json=BODY, headers=headers)
            assert response.status_code == 200, response.text
        *first, second = [message.owner for message in server.engine.received if isinstance(message, RequestSpec)]
        assert len(set(first)) == 1
        assert second not in (first[0], "")


async def test_a_key_with_letters_outside_ascii_is_limited_like_any_other() -> None:
    async with serving(access=TWO) as server:
        headers = {"authorization": "Bearer zw\u00f6lf".encode(), "x-api-key": "EMPTY"}
        answers = [await server.http.post("/v1/completions", json=BODY, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert "second is limited" in answers[1].json()["error"]["message"]


async def test_requests_that_generate_are_limited_with_any_method() -> None:
    async with serving(access=TWO) as server:
        headers = {"authorization": "Bearer zw\u00f6lf".encode()}
        answers = [await server.http.get("/health_generate", headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert (await server.http.get("/v1/models", headers=headers)).status_code == 200


async def test_one_of_several_clients_cannot_do_what_concerns_all_of_them() -> None:
    everywhere = [(path, {}) for path in SHARED_PATHS] + [("/abort_request", {"abort_all": True})]
    for access, expected in (
        (TWO, {403}),
        (Access(key="one", clients=(ClientKey("k", "other"),)), {403}),
        (Access(clients=(ClientKey("one", "only"),)), {200, 400}),
        (Access(key="one"), {200, 400}),
    ):
        async with serving(access=access) as server:
            for path, body in everywhere:
                method = "GET" if path.endswith("server_info") else "POST"
                answer = await server.http.request(method, path, json=body, headers={"x-api-key": "one"})
                assert answer.status_code in expected, (path, answer.text)
                assert answer.status_code != 403 or answer.json()["error"]["code"] == "admin_key_needed"
            missing = await server.http.post("/abort_request", json={"rid": "x"}, headers={"x-api-key": "one"})
            assert missing.status_code == 404


SEVERAL = (ClientKey("one", "first"), ClientKey("two", "second"))


@every(
    ("access", "key", "aborted"),
    [
        (Access(clients=SEVERAL), "one", {"own": 1, "other": 0, "same": 1, "same-1": 0}),
        (Access(key="one", clients=SEVERAL[1:]), "one", {"own": 1, "other": 0, "same": 1}),
        (Access(clients=SEVERAL, admin_key="operator"), "operator", {"own": 1, "other": 1, "same": 3}),
        (Access(), "unknown", {"own": 1, "other": 1, "same": 3}),  # nothing is protected
    ],
)
async def test_a_request_is_aborted_by_its_key_or_an_operator(
    access: Access, key: str, aborted: dict[str, int]
) -> None:
    """Two keys may use the same id at the same time, also as the id of a batch."""
    async with serving(FakeEngine(hold=True), access=access) as server:
        post = server.http.post
        sent = [("one", "own", "a"), ("one", "same", "a"), ("two", "other", "a"), ("two", "same", ["a", "b"])]
        tasks = [
            asyncio.create_task(post("/generate", json={"text": text, "rid": rid}, headers={"x-api-key": name}))
            for name, rid, text in sent
        ]
        await eventually(lambda: len(server.engine.running) == 5)
        for rid, count in aborted.items():
            answer = await post("/abort_request", json={"rid": rid}, headers={"x-api-key": key})
            assert answer.status_code == (200 if count else 404), (rid, answer.text)
            assert answer.json().get("aborted", 0) == count
        await eventually(lambda: len(server.engine.running) == 5 - sum(aborted.values()))
        server.app.state.lifecycle.abort(None)
        await asyncio.gather(*tasks)


async def test_each_of_several_clients_has_its_own_prefix_cache() -> None:
    sent = [("one", ""), ("one", ""), ("two", ""), ("one", "salt"), ("two", "salt")]
    for access, different in (
        (Access(clients=SEVERAL), 4),
        (Access(clients=SEVERAL, share_cache=True), 2),
        (Access(key="one", admin_key="two"), 2),
    ):
        async with serving(access=access) as server:
            for key, salt in sent:
                salted = {"cache_salt": salt} if salt else {}
                for path, body in (("/v1/completions", BODY), ("/v1/embeddings", {"input": "a"})):
                    answer = await server.http.post(path, json=body | salted, headers={"x-api-key": key})
                    assert answer.status_code == 200, answer.text
            spaces = [message.namespace for message in server.engine.received if isinstance(message, RequestSpec)]
            assert spaces[::2] == spaces[1::2]
            assert spaces[0] == spaces[2]
            assert len(set(spaces)) == different
