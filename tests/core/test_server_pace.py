"""What refused requests may cost those that run: refusals are paced, hopeless texts are not read to their end."""

from __future__ import annotations

import asyncio
import time

import pytest
from server_support import CONTEXT, eventually, serving

from srv.server.guard import REFUSALS_AT_ONCE, REFUSALS_PER_SECOND
from srv.server.pace import LONGEST_SECONDS, Pace
from srv.testing.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
BAD = {"prompt": "a", "max_tokens": -1}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_burst_goes_at_once_and_the_rest_evenly() -> None:
    pace = Pace(rate=10, burst=3)
    assert [pace.reserve(100.0) for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.2])
    assert pace.reserve(100.25) == pytest.approx(0.05)
    assert pace.reserve(200.0) == 0, "who waited long enough has a burst again"


def test_nobody_waits_longer_than_the_longest() -> None:
    pace = Pace(rate=10, burst=1)
    waits = [pace.reserve(0.0) for _ in range(100)]
    assert max(waits) == LONGEST_SECONDS
    assert pace.reserve(LONGEST_SECONDS) < 0.2, "those who were sent to the end did not make the line longer"


async def refuse(server: object, count: int) -> float:
    """Seconds in which one client after the other is refused, `count` times."""
    began = time.perf_counter()
    for _ in range(count):
        response = await server.post("/v1/completions", **BAD)  # type: ignore[attr-defined]
        assert response.status_code == 400
    return time.perf_counter() - began


async def test_refusals_are_paced_while_requests_run_and_only_then() -> None:
    count = REFUSALS_AT_ONCE + 15
    async with serving(FakeEngine(step_seconds=0.01)) as server:
        await server.post("/v1/completions", **BAD)  # what is loaded lazily is loaded
        idle = await refuse(server, count)
        running = asyncio.create_task(server.post("/v1/completions", prompt="a", max_tokens=200))
        await eventually(lambda: server.engine.running)
        busy = await refuse(server, count)
        good = time.perf_counter()
        assert (await server.post("/tokenize", prompt="a")).status_code == 200
        assert time.perf_counter() - good < 0.2, "what is not refused does not wait"
        assert (await running).status_code == 200
    assert busy > 0.8 * 15 / REFUSALS_PER_SECOND
    assert idle < busy


async def test_a_hopeless_text_is_encoded_in_part() -> None:
    async with serving(max_prompt_bytes=100_000) as server:
        text = server.app.state.service.text
        encode, lengths = text.encode, []

        def counting(given: str, add_special_tokens: bool = True) -> list[int]:
            lengths.append(len(given))
            return encode(given, add_special_tokens)

        text.encode = counting
        response = await server.post("/v1/completions", prompt="word " * 2000)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert f"the model's context is {CONTEXT} tokens" in error["message"]
        assert sum(lengths) < 10 * CONTEXT
        assert (await server.post("/tokenize", prompt="word " * 2000)).json()["count"] == 10_000


async def test_a_long_text_of_few_tokens_is_served() -> None:
    """Many characters a token: the part says nothing, so the whole is encoded, and fits."""
    async with serving(max_prompt_bytes=100_000) as server:
        text = server.app.state.service.text
        text.encode = lambda given, add_special_tokens=True: [97] * (len(given) // 100)
        response = await server.post("/v1/completions", prompt="a" * 6000, max_tokens=2)
        assert response.status_code == 200
        assert response.json()["usage"]["prompt_tokens"] == 60
