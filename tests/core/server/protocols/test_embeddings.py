"""`/v1/embeddings` over the fake engine: formats, options, and what ends a request early."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from every import every
from server_support import CONTEXT, MODEL, Serving, eventually, serving

from srv.io.messages import Abort, Output, Outputs
from srv.server.lifecycle import Ticket
from srv.testing.fake_engine import BOS, HIDDEN, ByteTokenizer, FakeEngine
from srv.types import FinishReason, Pooling, PoolingParams, RequestSpec

pytestmark = pytest.mark.anyio
PATH = "/v1/embeddings"


def sent(engine: FakeEngine) -> list[RequestSpec]:
    return [message for message in engine.received if isinstance(message, RequestSpec)]


def outcome(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_response_has_openai_format() -> None:
    async with serving(FakeEngine(cached_tokens=1)) as server:
        response = await server.post(PATH, model=MODEL, input=["ab", "c"], normalize=False, rid="mine", user="u1")
        assert response.status_code == 200, response.text
        assert response.json() == {
            "id": "mine",
            "object": "list",
            "data": [
                {"object": "embedding", "index": 0, "embedding": [98.0, 99.0, 100.0, 101.0]},
                {"object": "embedding", "index": 1, "embedding": [99.0, 100.0, 101.0, 102.0]},
            ],
            "model": MODEL,
            "usage": {"prompt_tokens": 3, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
        }
        assert (await server.post(PATH, input="a")).json()["id"].startswith("embd-")


async def test_a_conversation_is_embedded_as_the_chat_template_writes_it() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    async with serving() as server:
        for more, text in (
            ({}, "user: a\nassistant: b\n"),
            ({"continue_final_message": True}, "user: a\nassistant: b"),
        ):
            server.engine.received.clear()
            response = await server.post(PATH, messages=messages, **more)
            assert response.status_code == 200, response.text
            assert [bytes(spec.tokens).decode() for spec in sent(server.engine)] == [text]
        begun = await server.post(PATH, messages=messages[:1], add_generation_prompt=True)
        assert begun.json()["usage"]["prompt_tokens"] > len("user: a\n")
        for wrong, param in (
            ({"messages": messages, "input": "a"}, "input"),
            ({"messages": messages, "prompt_name": "query"}, "prompt_name"),
            ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
            ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ):
            refused = await server.post(PATH, **wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@every(
    ("value", "prompts"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
        ("a" * CONTEXT, [b"a" * CONTEXT]),  # no token needs to be left for an output
    ],
)
async def test_input_is_text_or_token_ids_alone_or_in_an_array(value: object, prompts: list[bytes]) -> None:
    async with serving() as server:
        answer = (await server.post(PATH, input=value)).json()
        assert [bytes(spec.tokens) for spec in sent(server.engine)] == prompts
        assert [item["index"] for item in answer["data"]] == list(range(len(prompts)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@every("pooling", list(Pooling))
@every(
    ("fields", "dimensions", "normalize"),
    [
        ({}, None, True),
        ({"dimensions": None, "normalize": None, "encoding_format": None}, None, True),
        ({"dimensions": 2}, 2, True),
        ({"dimensions": HIDDEN, "normalize": False, "encoding_format": "float"}, HIDDEN, False),
    ],
)
async def test_options_and_the_servers_pooling_reach_the_engine(
    pooling: Pooling, fields: dict[str, object], dimensions: int | None, normalize: bool
) -> None:
    async with serving(pooling=pooling) as server:
        answer = (await server.post(PATH, input="ab", **fields)).json()
        (spec,) = sent(server.engine)
        assert spec.params == PoolingParams(pooling=pooling, dimensions=dimensions, normalize=normalize)
        elements = answer["data"][0]["embedding"]
        assert len(elements) == (dimensions or HIDDEN)
        assert (math.hypot(*elements) == pytest.approx(1)) is normalize


async def test_base64_contains_little_endian_float32() -> None:
    async with serving() as server:
        numbers = (await server.post(PATH, input="ab")).json()["data"][0]["embedding"]
        encoded = (await server.post(PATH, input="ab", encoding_format="base64")).json()["data"][0]["embedding"]
        assert list(struct.unpack(f"<{HIDDEN}f", base64.b64decode(encoded))) == numbers


async def test_special_tokens_are_added_to_texts_unless_refused() -> None:
    async with serving(text=ByteTokenizer(adds_bos=True)) as server:
        for fields in ({"input": "a"}, {"input": "a", "add_special_tokens": False}, {"input": [97]}):
            await server.post(PATH, **fields)
        assert [spec.tokens.count(BOS) for spec in sent(server.engine)] == [1, 0, 0]


async def test_a_server_without_embeddings_says_how_to_enable_them() -> None:
    async with serving(pooling=None) as server:
        refused = await server.post(PATH, input="a")
        assert outcome(refused) == (400, "embeddings_disabled")
        assert "start the server with --is-embedding" in refused.json()["error"]["message"]
        assert not server.engine.received
        assert (await server.post("/v1/completions", prompt="a")).status_code == 200
        info = (await server.http.get("/get_model_info")).json()
        assert (info["is_embedding"], info["pooling"]) == (False, None)


async def test_embeddings_and_completions_run_together() -> None:
    async with serving() as server:
        embedded, completed = await asyncio.gather(
            server.post(PATH, input=["a"] * 20), server.post("/v1/completions", prompt="a", max_tokens=5, n=3)
        )
        assert len(embedded.json()["data"]) == 20
        assert [choice["text"] for choice in completed.json()["choices"]] == ["The q"] * 3
        metrics = (await server.http.get("/metrics")).text
        for line in (
            "srv_prompt_tokens_total 23.0",
            'srv_sequences_total{finish_reason="stop"} 20.0',
            'srv_sequences_total{finish_reason="length"} 3.0',
            "srv_request_seconds_count 23.0",
            "srv_time_to_first_token_seconds_count 3.0",
        ):
            assert line in metrics.splitlines()


# What ends a request early


async def waiting(server: Serving, **fields: Any) -> asyncio.Task[httpx.Response]:
    """A request for three embeddings, which the engine holds."""
    server.engine.hold = True
    task = asyncio.create_task(server.post(PATH, input=["a", "b", "c"], **fields))
    await eventually(lambda: len(server.engine.running) == 3)
    return task


@pytest.fixture
async def server() -> AsyncIterator[Serving]:
    async with serving() as server:
        yield server


async def test_a_request_is_aborted_by_its_id_as_a_whole(server: Serving) -> None:
    request = await waiting(server, rid="mine")
    assert outcome(await server.post(PATH, input="a", rid="mine")) == (409, "duplicate_request")
    assert (await server.post("/abort_request", rid="mine")).json() == {"aborted": 1}
    assert outcome(await request) == (499, "request_aborted")
    assert not server.engine.running
    assert 'srv_sequences_total{finish_reason="abort"} 3.0' in (await server.http.get("/metrics")).text
    server.engine.hold = False
    assert (await server.post(PATH, input="a", rid="mine")).status_code == 200


async def test_an_abort_between_admission_and_computation_is_effective(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = server.app.state.service
    admit = service.lifecycle.admit

    def admit_and_abort(requests: Sequence[tuple[str, int]], owner: str) -> Ticket:
        ticket: Ticket = admit(requests, owner=owner)
        assert service.lifecycle.abort(["mine"]) == 1
        return ticket

    monkeypatch.setattr(service.lifecycle, "admit", admit_and_abort)
    assert outcome(await server.post(PATH, input=["a", "b"], rid="mine")) == (499, "request_aborted")
    assert not sent(server.engine)
    assert service.lifecycle.active == 0


async def test_a_shutdown_answers_503(server: Serving) -> None:
    request = await waiting(server)
    await server.app.state.lifecycle.drain(0.0)
    assert outcome(await request) == (503, "shutting_down")
    assert outcome(await server.post(PATH, input="a")) == (503, "shutting_down")


async def test_a_dead_engine_answers_503(server: Serving) -> None:
    request = await waiting(server)
    server.engine.die()
    assert outcome(await request) == (503, "engine_dead")
    assert outcome(await server.post(PATH, input="a")) == (503, "engine_dead")
    assert 'srv_sequences_total{finish_reason="error"} 3.0' in (await server.http.get("/metrics")).text


@every(("error", "status"), [("queue_full", 503), ("exceeds_pool", 400), ("non_finite_hidden_states", 500)])
async def test_an_error_of_the_engine_ends_all_inputs(error: str, status: int) -> None:
    async with serving(FakeEngine(request_error=(error, "no"))) as server:
        assert outcome(await server.post(PATH, input=["a", "b"])) == (status, error)
        assert server.app.state.lifecycle.active == 0


async def test_the_first_failure_aborts_the_other_inputs(server: Serving) -> None:
    request = await waiting(server)
    first, failed, last = server.engine.running
    error = Output(failed, [], FinishReason.ERROR, error=("queue_full", "the queue is full"))
    server.engine._outbox.put_nowait(Outputs([error]))
    assert outcome(await request) == (503, "queue_full")
    await eventually(lambda: list(server.engine.running) == [failed])
    aborts = [message.requests for message in server.engine.received if isinstance(message, Abort)]
    assert sorted(aborts) == [[first], [last]]
    assert server.app.state.lifecycle.active == 0
