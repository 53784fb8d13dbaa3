"""The rate limiter of refusals and probes: clients are slowed down only while requests run, and none waits long."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from server_support import CONTEXT, Serving, eventually, serving

from srv.server.http import rate_limiter
from srv.server.http.auth import (
    MAX_ADDRESSES,
    PROBE_BURST,
    PROBES_PER_SECOND,
    REFUSAL_BURST,
    REFUSALS_PER_SECOND,
    ProbePacer,
)
from srv.server.http.rate_limiter import MAX_WAIT_SECONDS, RateLimiter
from srv.testing.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
BAD = {"prompt": "a", "max_tokens": -1}


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


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each permit had to wait for, on a clock that stands still: how fast this machine is decides
    nothing."""
    monkeypatch.setattr(rate_limiter, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    reserve, seconds = RateLimiter.reserve, []

    def recording(limiter: RateLimiter, now: float) -> float:
        seconds.append(reserve(limiter, now))
        return seconds[-1]

    monkeypatch.setattr(RateLimiter, "reserve", recording)
    return seconds


async def refuse(server: Serving, count: int) -> None:
    for _ in range(count):
        response = await server.post("/v1/completions", **BAD)
        assert response.status_code == 400


async def test_the_rate_of_refusals_is_limited_only_while_requests_run(waits: list[float]) -> None:
    late = 5
    async with serving(FakeEngine(hold=True)) as server:
        await refuse(server, REFUSAL_BURST + late)
        assert not waits, "an idle server delays nobody"
        running = asyncio.create_task(server.post("/v1/completions", prompt="a", max_tokens=200))
        await eventually(lambda: server.engine.running)
        await refuse(server, REFUSAL_BURST + late)
        running.cancel()
    assert waits == pytest.approx([0] * REFUSAL_BURST + [n / REFUSALS_PER_SECOND for n in range(1, late + 1)])


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


async def probe(server: Serving, count: int) -> None:
    paths = itertools.islice(itertools.cycle(("/health", "/ping", "/metrics")), count)
    answers = await asyncio.gather(*(server.http.get(path) for path in paths))
    assert {answer.status_code for answer in answers} == {200}


async def test_the_rate_of_probes_is_limited_only_while_requests_run(waits: list[float]) -> None:
    """They need no key, and all of them share one limit per address."""
    late = 5
    async with serving(FakeEngine(hold=True)) as server:
        await probe(server, PROBE_BURST + late)
        assert not waits, "an idle server delays nobody"
        running = asyncio.create_task(server.post("/v1/completions", prompt="a", max_tokens=200))
        await eventually(lambda: server.engine.running)
        await probe(server, PROBE_BURST + late)
        running.cancel()
    assert waits == pytest.approx([0] * PROBE_BURST + [n / PROBES_PER_SECOND for n in range(1, late + 1)])


async def test_an_address_that_floods_delays_no_other_s_probes() -> None:
    pacer = ProbePacer()
    flood = [asyncio.create_task(pacer.acquire("10.0.0.1")) for _ in range(2 * PROBE_BURST)]
    await asyncio.sleep(0)
    assert sum(task.done() for task in flood) < len(flood)
    other = asyncio.create_task(pacer.acquire("10.0.0.2"))
    await asyncio.sleep(0)
    assert other.done(), "it has waited for nothing"
    for task in flood:
        task.cancel()
    for number in range(2 * MAX_ADDRESSES):
        await pacer.acquire(f"10.1.{number // 256}.{number % 256}")
    assert len(pacer._limiters) == MAX_ADDRESSES, "addresses that anybody can make up take no memory"
