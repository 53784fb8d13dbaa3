"""Several outputs of one prompt with its log-probabilities: these are computed once, and each output reports them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
from server_support import events_of, eventually, serving

from srv.server.protocols.common import logprobs
from srv.testing.fake_engine import FakeEngine
from srv.types import PoolingParams, RequestSpec, SamplingParams

pytestmark = pytest.mark.anyio


def scored(engine: FakeEngine) -> list[bool]:
    """Of each sequence sent to the engine, whether it computes the log-probabilities of its prompt."""
    params = [message.params for message in engine.received if isinstance(message, RequestSpec)]
    assert not any(isinstance(param, PoolingParams) for param in params)
    return [isinstance(param, SamplingParams) and param.prompt_logprobs is not None for param in params]


async def test_each_prompt_is_scored_once_and_each_choice_reports_it() -> None:
    async with serving() as server:
        body = {"prompt": ["ab", "cde"], "n": 16, "max_tokens": 3, "prompt_logprobs": 1, "seed": 1}
        choices = (await server.post("/v1/completions", **body)).json()["choices"]
        assert (len(choices), len(scored(server.engine)), sum(scored(server.engine))) == (32, 32, 2)
        for index, choice in enumerate(choices):
            first = choices[index - index % 16]
            assert choice["prompt_logprobs"] == first["prompt_logprobs"]
            assert len(choice["prompt_logprobs"]) == (2 if index < 16 else 3)
            assert choice["prompt_logprobs"][1]


async def test_in_streams_and_without_output() -> None:
    async with serving() as server:
        events = await server.stream("/v1/completions", prompt="ab", n=3, max_tokens=2, prompt_logprobs=0)
        sent = [choice["index"] for event in events[:-1] for choice in event["choices"] if "prompt_logprobs" in choice]
        assert sorted(sent) == [0, 1, 2]
        only = await server.post("/v1/completions", prompt="ab", n=3, max_tokens=0, echo=True, logprobs=0)
        assert [len(choice["logprobs"]["tokens"]) for choice in only.json()["choices"]] == [2, 2, 2]
        assert sum(scored(server.engine)) == 2


async def test_an_abort_ends_the_outputs_that_wait_for_the_first() -> None:
    async with serving(FakeEngine(hold=True)) as server:
        body = {"prompt": "ab", "n": 4, "max_tokens": 3, "prompt_logprobs": 0, "rid": "r", "stream": True}
        streaming = asyncio.create_task(server.http.post("/v1/completions", json=body))
        await eventually(lambda: server.engine.running)
        assert len(server.engine.running) == 1
        await server.post("/abort_request", rid="r")
        response = await streaming
        finishes = [c["finish_reason"] for e in events_of(response.text)[:-1] for c in e["choices"]]
        assert finishes.count("abort") == 4
        assert server.app.state.lifecycle.active == 0


async def test_many_logprobs_are_formatted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def recorded(logprob: float) -> float:
        threads.add(threading.get_ident())
        return logprob

    monkeypatch.setattr(logprobs, "finite", recorded)
    few = {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    many = {"logprobs": True, "top_logprobs": 20, "max_tokens": 40, "n": 4}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    native = {"return_logprob": True, "top_logprobs_num": 20, "return_text_in_logprobs": True, "text": "a"}
    async with serving() as server:
        for here, path, body in (
            (True, "/v1/chat/completions", {**chat, **few}),
            (False, "/v1/chat/completions", {**chat, **many}),
            (False, "/generate", {**native, "sampling_params": {"max_new_tokens": 150}}),
        ):
            threads.clear()
            response = await server.post(path, **body)
            assert response.status_code == 200, response.text
            assert (threading.get_ident() in threads) is here


async def test_a_long_prompts_logprobs_are_streamed_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[bool] = Counter()

    def counted(logprob: float) -> float:
        counts[threading.get_ident() == here] += 1
        return logprob

    monkeypatch.setattr(logprobs, "finite", counted)
    here, text = threading.get_ident(), "a" * 150
    native = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5}
    async with serving() as server:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "prompt_logprobs": 5}),
            ("/v1/completions", {"prompt": text, "prompt_logprobs": 5}),
            ("/v1/completions", {"prompt": text, "echo": True, "logprobs": 5}),
            ("/generate", {"text": text, **native, "sampling_params": {"max_new_tokens": 2}}),
        ):
            counts.clear()
            limit = {} if path == "/generate" else {"max_tokens": 2}
            events = await server.stream(path, **body, **limit)
            assert events[-1] == "[DONE]"
            assert counts[False] > 700, path  # five or six for each token of the prompt
            assert counts[True] < 20, path
