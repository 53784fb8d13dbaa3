"""`/generate` and `/abort_request` over the fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from every import every
from server_support import eventually, serving

from srv.io.messages import Abort, Output, Outputs
from srv.testing.fake_engine import EOS, HIDDEN, FakeEngine, fake_hidden_states
from srv.types import RequestSpec

pytestmark = pytest.mark.anyio


async def test_single_text_gives_one_object() -> None:
    async with serving(FakeEngine(script=lambda message: [*b"hi", EOS], cached_tokens=1)) as server:
        answer = (await server.post("/generate", text="abc", sampling_params={"max_new_tokens": 8}, rid="mine")).json()
        assert answer["text"] == "hi"
        assert answer["output_ids"] == [104, 105, EOS]
        meta = answer["meta_info"]
        assert meta.pop("e2e_latency") > 0
        assert meta == {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 1,
        }


async def test_a_batch_gives_a_list_and_takes_parameters_per_prompt() -> None:
    async with serving() as server:
        body = {
            "input_ids": [[1, 2], [3]],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
            "rid": ["a", "b"],
        }
        answer = (await server.post("/generate", **body)).json()
        assert [one["meta_info"]["id"] for one in answer] == ["a", "b"]
        assert [one["text"] for one in answer] == ["T", "Th"]
        assert [one["meta_info"]["finish_reason"] for one in answer] == [
            {"type": "length", "length": 1},
            {"type": "length", "length": 2},
        ]


async def test_default_length_is_128_or_what_fits() -> None:
    async with serving() as server:
        for size in (10, 250):
            await server.post("/generate", input_ids=[1] * size)
        lengths = [message.params.max_tokens for message in server.engine.received if isinstance(message, RequestSpec)]
        assert lengths == [128, 6]


async def test_stream_is_cumulative() -> None:
    async with serving() as server:
        events = await server.stream("/generate", text="a", sampling_params={"max_new_tokens": 3})
        assert events[-1] == "[DONE]"
        assert [event["text"] for event in events[:-1]] == ["T", "Th", "The"]
        assert [event["output_ids"] for event in events[:-1]][-1] == list(b"The")
        assert [event["meta_info"]["finish_reason"] for event in events[:-1]][:2] == [None, None]
        assert "index" not in events[0]


async def test_a_stream_repeats_the_output_and_sends_prompt_logprobs_first_and_last() -> None:
    """The last event is the complete response; the others do not repeat fields that do not change."""
    body = {
        "text": "abcd",
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    async with serving() as server:
        *events, _ = await server.stream("/generate", **body)
        whole = (await server.post("/generate", **body)).json()
    metas = [event["meta_info"] for event in events]
    for count, event in enumerate(events, 1):
        assert event["output_ids"] == whole["output_ids"][:count]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert event["meta_info"][name] == whole["meta_info"][name][:count]
    with_prompt = [count for count, meta in enumerate(metas) if "input_token_logprobs" in meta]
    assert with_prompt == [0, 3]
    for name in ("input_token_logprobs", "input_top_logprobs"):
        assert metas[0][name] == metas[3][name] == whole["meta_info"][name]
        assert len(whole["meta_info"][name]) == 4


async def test_batch_stream_has_the_index() -> None:
    async with serving() as server:
        events = await server.stream("/generate", text=["a", "b"], sampling_params={"max_new_tokens": 2})
        last = {event["index"]: event["text"] for event in events[:-1]}
        assert last == {0: "Th", 1: "Th"}


async def test_logprobs_of_prompt_and_output() -> None:
    async with serving() as server:
        body = {"text": "ab", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        extra = {"logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
        meta = (await server.post("/generate", **body, **extra)).json()["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 97, "a"], [pytest.approx(-0.098), 98, "b"]]
        assert meta["input_top_logprobs"] == [None, [[pytest.approx(-0.098), 98, "b"]]]
        assert meta["output_token_logprobs"] == [[pytest.approx(-0.084), 84, "T"]]
        assert meta["output_top_logprobs"] == [[[pytest.approx(-0.084), 84, "T"]]]
        plain = (await server.post("/generate", **body)).json()["meta_info"]
        assert plain["output_token_logprobs"] == [[pytest.approx(-0.084), 84, None]]
        assert "input_token_logprobs" not in plain


async def test_log_probabilities_of_given_tokens_at_every_position() -> None:
    async with serving() as server:
        body: dict[str, Any] = {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
        options = {"logprob_start_len": [0, -1], "token_ids_logprob": [[7, 5], None], "return_text_in_logprobs": True}
        first, second = (meta["meta_info"] for meta in (await server.post("/generate", **body, **options)).json())
        entry = [[pytest.approx(-0.007), 7, "\x07"], [pytest.approx(-0.005), 5, "\x05"]]
        assert first["input_token_ids_logprobs"] == [None, entry]
        assert first["output_token_ids_logprobs"] == [entry, entry]
        assert not [name for name in second if "token_ids" in name]
        assert [spec.params.logprob_token_ids for spec in server.engine.received] == [(7, 5), ()]


async def test_one_array_of_given_tokens_is_for_all_prompts_and_streams() -> None:
    async with serving() as server:
        body: dict[str, Any] = {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
        *events, _ = await server.stream("/generate", **body, token_ids_logprob=[5])
        for event in events:
            entry = [[pytest.approx(-0.005), 5, None]]
            assert event["meta_info"]["output_token_ids_logprobs"] == [entry] * len(event["output_ids"])
            assert "input_token_ids_logprobs" not in event["meta_info"]
        refused = await server.post("/generate", **body, token_ids_logprob=[[5], 5])
        assert refused.json()["error"]["param"] == "token_ids_logprob[1]"


def states(text: str) -> list[list[float]]:
    """The hidden states of the fake engine."""
    return [[float(token + index) for index in range(HIDDEN)] for token in text.encode()]


@every(
    ("params", "shown"),
    [
        ({"max_new_tokens": 3}, "on"),
        ({"max_new_tokens": 1}, ""),
        ({"max_new_tokens": 0}, ""),
        ({"stop": "d"}, "one en"),  # of the tokens of the stop string, none is in the output
    ],
)
@every("tokens_per_step", [1, 3])
async def test_hidden_states_are_those_of_the_prompt_and_of_the_output_without_its_last_token(
    params: dict[str, object], shown: str, tokens_per_step: int
) -> None:
    engine = FakeEngine(script=lambda message: b"one end", tokens_per_step=tokens_per_step)
    body = {"text": "abc", "sampling_params": params, "return_hidden_states": True}
    async with serving(engine) as server:
        answer = (await server.post("/generate", **body)).json()
        *events, _ = await server.stream("/generate", **body)
    prompt, *output = answer["meta_info"]["hidden_states"]
    assert prompt == states("abc")
    assert output == states(shown)[: max(0, len(answer["output_ids"]) - 1)]
    assert len(prompt) + len(output) == 3 + max(0, answer["meta_info"]["completion_tokens"] - 1)
    assert events[-1]["meta_info"]["hidden_states"] == [prompt, *output]
    for event in events:  # each repeats those that it had before
        assert event["meta_info"]["hidden_states"] == [prompt, *output][: max(1, len(event["output_ids"]))]


async def test_hidden_states_can_be_requested_per_prompt_if_the_server_returns_them() -> None:
    async with serving() as server:
        body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}, "return_hidden_states": [False, True]}
        plain, with_states = (await server.post("/generate", **body)).json()
        assert "hidden_states" not in plain["meta_info"]
        assert with_states["meta_info"]["hidden_states"] == [states("b"), *states("T")]
    async with serving(return_hidden_states=False) as server:
        refused = await server.post("/generate", **body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "hidden_states_disabled")
        assert error["param"] == "return_hidden_states"
        assert "start it with --enable-return-hidden-states" in error["message"]
        assert not server.engine.received
        assert (await server.post("/generate", text="a", return_hidden_states=False)).status_code == 200


async def test_a_prompt_aborted_in_between_has_the_hidden_states_computed_so_far() -> None:
    """The engine sends those of a long prompt in several steps."""
    async with serving(FakeEngine(hold=True)) as server:
        request = asyncio.create_task(server.post("/generate", text="abc", rid="x", return_hidden_states=True))
        await eventually(lambda: server.engine.running)
        part = Output(next(iter(server.engine.running)), [], vectors=fake_hidden_states(b"ab"))
        server.engine._outbox.put_nowait(Outputs([part]))
        await server.post("/abort_request", rid="x")
        assert (await request).json()["meta_info"]["hidden_states"] == [states("ab")]


async def test_no_stop_trim_keeps_the_stop_string() -> None:
    async with serving(FakeEngine(script=lambda message: b"one two")) as server:
        for trim, shown in ((False, "one"), (True, "one two")):
            params = {"stop": " two", "no_stop_trim": trim}
            answer = (await server.post("/generate", text="a", sampling_params=params)).json()
            assert answer["text"] == shown
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": " two"}


@every("abort", [{"rid": "x"}, {"rid": ["x"]}, {"abort_all": True}])
async def test_abort_by_id_ends_the_response_with_abort(abort: dict[str, object]) -> None:
    async with serving(FakeEngine(hold=True)) as server:
        waiting = asyncio.create_task(server.post("/generate", text="a", rid="x"))
        await eventually(lambda: server.engine.running)
        assert (await server.post("/abort_request", **abort)).json() == {"aborted": 1}
        answer = (await waiting).json()
        assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "the request was aborted"}
        assert not server.engine.running
        assert sum(isinstance(message, Abort) for message in server.engine.received) == 1


async def test_the_id_of_a_batch_aborts_all_of_its_prompts() -> None:
    async with serving(FakeEngine(hold=True)) as server:
        pending = asyncio.create_task(server.post("/generate", text=["a", "b"], rid="all"))
        await eventually(lambda: len(server.engine.running) == 2)
        taken = await server.post("/generate", text="a", rid="all")
        assert (taken.status_code, taken.json()["error"]["code"]) == (409, "duplicate_request")
        assert (await server.post("/abort_request", rid=["all", "all-1"])).json() == {"aborted": 2}
        assert [one["meta_info"]["finish_reason"]["type"] for one in (await pending).json()] == ["abort"] * 2
        assert not server.engine.running
        assert (await server.post("/abort_request", rid="all")).status_code == 404


@every(
    ("params", "field"),
    [
        ({"max_new_tokens": 8192}, "max_new_tokens"),
        ({"max_new_tokens": 2, "min_new_tokens": 5}, "min_new_tokens"),
        ({"logit_bias": {"49152": 100}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop": ["x"] * 20}, "stop"),
    ],
)
async def test_refusals_that_need_the_model_name_the_fields_of_the_request(
    params: dict[str, object], field: str
) -> None:
    async with serving() as server:
        for text, sampling, name in (
            ("a", params, "sampling_params"),
            (["a", "b"], [{}, params], "sampling_params[1]"),
        ):
            answer = await server.post("/generate", text=text, sampling_params=sampling)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == f"{name}.{field}"
            assert answer.json()["error"]["message"].startswith(f"{name}.{field} ")


async def test_openai_requests_are_aborted_by_their_rid_too() -> None:
    async with serving(FakeEngine(hold=True)) as server:
        waiting = asyncio.create_task(server.post("/v1/completions", prompt="a", rid="mine", n=2))
        await eventually(lambda: len(server.engine.running) == 2)
        assert (await server.post("/abort_request", rid="mine")).json() == {"aborted": 1}
        answer = (await waiting).json()
        assert answer["id"] == "mine"
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]


async def test_a_request_id_is_refused_while_it_is_in_use() -> None:
    async with serving(FakeEngine(hold=True)) as server:
        waiting = asyncio.create_task(server.post("/generate", text="a", rid="x"))
        await eventually(lambda: server.engine.running)
        second = await server.post("/v1/completions", prompt="a", rid="x")
        assert second.status_code == 409
        assert second.json()["error"]["code"] == "duplicate_request"
        await server.post("/abort_request", abort_all=True)
        await waiting
        server.engine.hold = False
        assert (await server.post("/generate", text="a", rid="x")).status_code == 200
        twice = await server.post("/generate", text=["a", "b"], rid=["y", "y"])
        assert twice.json()["error"]["param"] == "rid"


@every(
    ("body", "param", "part"),
    [
        ({}, "text", "neither"),
        ({"text": "a", "input_ids": [1]}, "text", "both"),
        ({"text": [1, 2]}, "text", "texts"),
        ({"input_ids": "abc"}, "input_ids", "token ids"),
        ({"input_ids": [1, 260]}, "input_ids", "260"),
        ({"input_ids": []}, "input_ids", "no tokens"),
        ({"input_ids": [[1], []]}, "input_ids[1]", "empty"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens", "max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature", "greater than or equal"),
        ({"text": "a", "sampling_params": 3}, "sampling_params", "object"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "one prompt"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "1 entries for 2"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num", "return_logprob"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len", "return_logprob"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len", "1 tokens"),
        ({"text": "a", "return_logprob": 1}, "return_logprob", "true or false"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num", "0 to 20"),
        ({"text": "a", "token_ids_logprob": [5]}, "token_ids_logprob", "return_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": 5}, "token_ids_logprob", "array of token ids"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [5, True]}, "token_ids_logprob", "array of token"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [260]}, "token_ids_logprob", "0 to 259"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob", "0 to 259"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [1] * 129}, "token_ids_logprob", "limit is 128"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [[1]]}, "token_ids_logprob", "one prompt"),
        (
            {"text": ["a"], "return_logprob": True, "token_ids_logprob": [[1], [2]]},
            "token_ids_logprob",
            "for 1 prompts",
        ),
        (
            {
                "text": ["a"] * 100,
                "return_logprob": True,
                "token_ids_logprob": [1] * 128,
                "sampling_params": {"max_new_tokens": 100},
            },
            "token_ids_logprob",
            "up to 1280000 log-probabilities",
        ),
        ({"text": "a", "return_hidden_states": 1}, "return_hidden_states", "true or false"),
        ({"text": "a", "rid": ""}, "rid", "256"),
        ({"text": "a", "image_data": "x"}, "image_data", "images"),
        ({"prompt": "a"}, "prompt", "called text"),
    ],
)
async def test_error_for_invalid_native_input_names_the_field(body: dict[str, object], param: str, part: str) -> None:
    async with serving() as server:
        response = await server.post("/generate", **body)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"] == param
        assert part in error["message"]
        assert not server.engine.received
