"""Bad input, disconnects and load do not affect other clients: streams continue, and pages are freed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from bad_inputs import BAD_INPUTS, LIMITS, Bad
from e2e_support import (
    Server,
    events,
    greedy,
    leave_after,
    prompts,
    served,
    stream_ids,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# In float32 the shape of a batch does not change tokens, so outputs alone and in a batch can be compared.
SERVER_ARGUMENTS = ("--dtype", "float32", "--max-running-requests", "16", *LIMITS)
STORY = "Once upon a time there was"
LONG_TOKENS = 120


# ---- bad input


async def refuse(client: httpx.AsyncClient, bad: Bad) -> None:
    response = await client.post(bad.path, content=bad.body, headers={"content-type": "application/json"})
    assert response.status_code == bad.status, (bad.name, response.status_code, response.text)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}, bad.name
    assert error["code"] == bad.code, (bad.name, error)
    assert error["message"], bad.name


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
def test_bad_input_is_refused_in_openais_shape(server: Server, bad: Bad) -> None:
    async def one() -> None:
        async with server.asynchronous() as client:
            await refuse(client, bad)

    asyncio.run(one())
    assert server.health() == 200


async def disconnect_in_the_head(server: Server) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nConte")
    await writer.drain()
    writer.close()


async def disconnect_in_the_body(server: Server) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"text": "a')
    await writer.drain()
    writer.close()


async def disconnect_before_the_answer(server: Server) -> None:
    """Ask for a long output without streaming, and disconnect while it is generated."""
    async with server.asynchronous() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/generate", json=greedy("A long one", 1000), timeout=httpx.Timeout(60, read=0.3))


async def storm(server: Server) -> None:
    """Send every bad input twice, eight at a time, together with clients that disconnect."""
    twice = BAD_INPUTS * 2
    async with server.asynchronous() as client:
        for begin in range(0, len(twice), 8):
            disconnecting: list[Awaitable[Any]] = [
                disconnect_in_the_head(server),
                disconnect_in_the_body(server),
                leave_after(client, greedy("Somebody who leaves", 500), 3),
            ]
            await asyncio.gather(*disconnecting, *(refuse(client, bad) for bad in twice[begin : begin + 8]))
        await disconnect_before_the_answer(server)


def test_a_storm_of_bad_input_changes_no_token_of_a_running_stream(server: Server) -> None:
    body = greedy(STORY, LONG_TOKENS)
    alone = server.generate(**body)["output_ids"]
    aborted = server.metrics()["srv_sequences_aborted_total"]

    async def together() -> list[int]:
        async with server.asynchronous() as client:
            streaming = asyncio.create_task(stream_ids(client, body))
            while not streaming.done():
                await storm(server)
            return await streaming

    assert asyncio.run(together()) == alone
    after = server.wait_pages_back()
    assert after["srv_kv_pages_free"] + after["srv_kv_pages_cached"] == after["srv_kv_pages_total"]
    assert after["srv_sequences_aborted_total"] > aborted
    assert after['srv_sequences_total{finish_reason="error"}'] == 0
    assert after.get('srv_http_responses_total{status="500"}', 0) == 0
    assert server.health() == 200
    assert "Traceback" not in server.log_text()


# ---- clients that disconnect


@pytest.mark.parametrize("seen", [1, 20])
def test_pages_are_freed_when_a_client_disconnects_from_its_stream(server: Server, seen: int) -> None:
    async def leave() -> int:
        async with server.asynchronous() as client:
            return await leave_after(client, greedy(STORY, 1500), seen)

    before = server.metrics()
    assert asyncio.run(leave()) == seen
    after = server.wait_pages_back()
    assert after["srv_sequences_aborted_total"] == before["srv_sequences_aborted_total"] + 1
    assert after["srv_generated_tokens_total"] - before["srv_generated_tokens_total"] < 1500


def test_pages_are_freed_when_a_client_disconnects_from_a_batch(server: Server) -> None:
    body = {**greedy(STORY, 400), "text": [STORY, "Another", "And a third"]}

    async def leave() -> None:
        async with server.asynchronous() as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/generate", json=body, timeout=httpx.Timeout(60, read=1))

    before = server.metrics()["srv_sequences_aborted_total"]
    asyncio.run(leave())
    assert server.wait_pages_back()["srv_sequences_aborted_total"] == before + 3


# ---- a pool that is too small for all of them


def test_retracted_requests_lose_no_token(tmp_path_factory: pytest.TempPathFactory) -> None:
    arguments = (
        "--device", "cpu", "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "256",
        "--schedule-conservativeness", "0.05",
    )  # fmt: skip
    bodies = [greedy(prompt, 48) for prompt in prompts(8, 16, seed=1)]
    with served(tmp_path_factory.mktemp("tiny") / "log", *arguments) as tiny:
        alone = [tiny.generate(**body)["output_ids"] for body in bodies]
        assert tiny.metrics()["srv_retractions_total"] == 0
        tiny.flush()

        async def together() -> list[list[int]]:
            async with tiny.asynchronous() as client:
                return list(await asyncio.gather(*(stream_ids(client, body) for body in bodies)))

        assert asyncio.run(together()) == alone
        after = tiny.wait_pages_back()
        assert after["srv_retractions_total"] > 0
        assert after["srv_kv_pages_free"] + after["srv_kv_pages_cached"] == after["srv_kv_pages_total"]


# ---- load


@dataclass(frozen=True)
class Visit:
    """One client: its request, and after how many events it disconnects or aborts the request, if at all."""

    body: dict[str, Any]
    leaves_after: int | None = None
    aborts_after: int | None = None


def visits(count: int, seed: int) -> list[Visit]:
    draw = random.Random(seed)
    shared = prompts(4, 40, seed)
    all_visits = []
    for index in range(count):
        prompt = draw.choice(shared) + " " + " ".join(draw.choices("abcdefg", k=draw.randrange(0, 60)))
        body = greedy(prompt, draw.randrange(8, 64), rid=f"visit-{index}")
        body["sampling_params"] |= {"temperature": draw.choice((0, 0.8)), "sampling_seed": index}
        kind = draw.random()
        when = draw.randrange(0, 30)
        all_visits.append(Visit(body, when if kind < 0.4 else None, when if 0.4 <= kind < 0.6 else None))
    return all_visits


async def visit(client: httpx.AsyncClient, one: Visit) -> str:
    """How the request ended: "left", "aborted" or "whole"."""
    seen = 0
    async with client.stream("POST", "/generate", json={**one.body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        last: Any = None
        async for event in events(response):
            if event == "[DONE]":
                reason = last["meta_info"]["finish_reason"]["type"]
                if reason == "length":
                    assert len(last["output_ids"]) == one.body["sampling_params"]["max_new_tokens"]
                return "aborted" if reason == "abort" else "whole"
            last, seen = event, seen + 1
            if one.leaves_after is not None and seen > one.leaves_after:
                return "left"
            if seen - 1 == one.aborts_after:
                response = await client.post("/abort_request", json={"rid": one.body["rid"]})
                assert response.status_code in (200, 404), response.text  # 404: it has just ended
    raise AssertionError("the stream ended without [DONE]")


def test_64_streams_with_random_cancels_leave_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> None:
    log = tmp_path_factory.mktemp("load") / "log"
    with served(log, "--device", "cpu", "--max-total-tokens", "8192", "--chunked-prefill-size", "128") as loaded:
        question = greedy("The capital of France is", 16)
        right = loaded.generate(**question)["output_ids"]

        async def all_at_once(seed: int) -> list[str]:
            async with loaded.asynchronous() as client:
                return list(await asyncio.gather(*(visit(client, one) for one in visits(64, seed))))

        for seed in range(2):
            ended = asyncio.run(all_at_once(seed))
            assert {"left", "aborted", "whole"} <= set(ended)
            after = loaded.wait_pages_back()
            assert after["srv_kv_pages_held"] == 0
            assert after["srv_kv_pages_free"] + after["srv_kv_pages_cached"] == after["srv_kv_pages_total"]
        assert after['srv_sequences_total{finish_reason="error"}'] == 0
        assert loaded.health() == 200
        loaded.flush()
        assert loaded.metrics()["srv_kv_pages_free"] == loaded.metrics()["srv_kv_pages_total"]
        assert loaded.generate(**question)["output_ids"] == right
