"""The rate limiter of refusals: clients are slowed down only while requests run, and no refusal waits long."""

from __future__ import annotations

import asyncio
import time

import pytest
from server_support import CONTEXT, eventually, serving

from srv.server.http.auth import REFUSAL_BURST, REFUSALS_PER_SECOND
from srv.server.http.rate_limiter import MAX_WAIT_SECONDS, RateLimiter
from srv.testing.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
BAD = {"prompt": "a", "max_tokens": -1}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_burst_passes_at_once_and_the_rest_evenly() -> None:
    limiter = RateLimiter(rate=10, burst=3)
    assert [limiter.reserve(100.0) for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.2])
    assert limiter.reserve(100.25) == pytest.approx(0.05)
    assert limiter.reserve(200.0) == 0, "after a pause a whole burst is allowed again"


def test_no_refusal_waits_longer_than_the_maximum() -> None:
    limiter = RateLimiter(rate=10, burst=1)
    waits = [limiter.reserve(0.0) for _ in range(100)]
    assert max(waits) == MAX_WAIT_SECONDS
    assert limiter.reserve(MAX_WAIT_SECONDS) < 0.2, "refusals beyond the maximum do not make the queue longer"


async def refuse(server: object, count: int) -> float:
    """The seconds that `count` refusals take, one after another."""
    start = time.perf_counter()
    for _ in range(count):
        response = await server.post("/v1/completions", **BAD)  # type: ignore[attr-defined]
        assert response.status_code == 400
    return time.perf_counter() - start


async def test_the_rate_of_refusals_is_limited_only_while_requests_run() -> None:
    count = REFUSAL_BURST + 15
    async with serving(FakeEngine(step_seconds=0.01)) as server:
        await server.post("/v1/completions", **BAD)  # triggers lazy imports
        idle = await refuse(server, count)
        running = asyncio.create_task(server.post("/v1/completions", prompt="a", max_tokens=200))
        await eventually(lambda: server.engine.running)
        busy = await refuse(server, count)
        assert (await running).status_code == 200
    assert busy > 0.8 * 15 / REFUSALS_PER_SECOND
    assert idle < busy


async def test_only_the_beginning_of_a_far_too_long_text_is_encoded() -> None:
    async with serving(max_prompt_bytes=100_000) as server:
        text = server.app.state.service.text
        encode, lengths = text.encode, []

        def counting(value: str, add_special_tokens: bool = True) -> list[int]:
            lengths.append(len(value))
            return encode(value, add_special_tokens)

        text.encode = counting
        response = await server.post("/v1/completions", prompt="word " * 2000)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert f"the model's context is {CONTEXT} tokens" in error["message"]
        assert sum(lengths) < 10 * CONTEXT
        assert (await server.post("/tokenize", prompt="word " * 2000)).json()["count"] == 10_000


async def test_a_long_text_with_few_tokens_is_served() -> None:
    """With many characters per token the first part has few tokens, so the whole text is encoded and fits."""
    async with serving(max_prompt_bytes=100_000) as server:
        text = server.app.state.service.text
        text.encode = lambda value, add_special_tokens=True: [97] * (len(value) // 100)
        response = await server.post("/v1/completions", prompt="a" * 6000, max_tokens=2)
        assert response.status_code == 200
        assert response.json()["usage"]["prompt_tokens"] == 60
