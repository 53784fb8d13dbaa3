"""Fields that clients of other servers send: those that ask for nothing are taken, the cheap ones have their effect."""

from __future__ import annotations

from typing import Any

import pytest
from every import every
from server_support import MODEL, STORED_FILE, eventually, serving, settings_for

from srv.errors import RequestError
from srv.server.app import REQUEST_BODIES
from srv.server.request.seeds import seeds_for
from srv.server.text.fill_in import FillIn
from srv.testing.fake_engine import EOS, ByteTokenizer, FakeEngine
from srv.types import RequestSpec

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hi"}]
COMPLETION, CHAT, GENERATE, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/generate", "/v1/embeddings"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "abc", "max_tokens": 2},
    CHAT: {"messages": HELLO, "max_tokens": 2},
    GENERATE: {"text": "abc", "sampling_params": {"max_new_tokens": 2}},
    EMBEDDINGS: {"input": "abc"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/classify": {"input": "a"},
    "/classify": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/abort_request": {"abort_all": True},
    "/v1/responses": {"input": "abc", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "abc"},
    "/v1/messages": {"model": MODEL, "max_tokens": 2, "messages": HELLO},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": HELLO},
    "/start_profile": {},
    "/pause_generation": {},
    "/continue_generation": {},
    "/set_log_level": {"level": "info"},
    "/v1/batches": {"input_file_id": STORED_FILE, "endpoint": COMPLETION, "completion_window": "24h"},
}


def sent(engine: FakeEngine) -> list[RequestSpec]:
    return [message for message in engine.received if isinstance(message, RequestSpec)]


@every("path", REQUEST_BODIES)
async def test_an_unknown_field_is_refused_unless_it_asks_for_nothing(path: str) -> None:
    async with serving(**settings_for(path)) as server:
        for nothing in (None, False, "", [], {}):
            response = await server.post(path, **BODIES[path], return_routed_experts=nothing)
            assert response.status_code == 200, response.text
        for something in (True, 0, 1, "a", [None], {"a": None}):
            error = (await server.post(path, **BODIES[path], return_routed_experts=something)).json()["error"]
            assert "unknown field return_routed_experts" in error["message"]
            assert error.get("code", "unknown_field") == "unknown_field"  # Anthropic's errors have no code


async def test_the_rule_holds_in_nested_bodies() -> None:
    parts = [{"type": "text", "text": "hi", "cache_control": None}]
    messages = [{"role": "user", "content": parts, "weight": None, "audio": None, "tool_calls": []}]
    params = {"max_new_tokens": 2, "regex": None, "structural_tag": None, "frobnicate": False}
    async with serving() as server:
        chat = await server.post(CHAT, messages=messages, max_tokens=1, stream_options={"frobnicate": False})
        assert chat.status_code == 200, chat.text
        native = await server.post(GENERATE, text="a", sampling_params=params, lora_path="", image_data=[])
        assert native.status_code == 200, native.text
        for body, param in (
            ({"messages": [{**messages[0], "weight": 1}]}, "messages[0].weight"),
            ({"messages": [{"role": "user", "content": [{**parts[0], "cache_control": {"type": "x"}}]}]}, "messages"),
        ):
            assert (await server.post(CHAT, **body)).json()["error"]["param"].startswith(param)


@every(
    ("path", "fields"),
    [
        (CHAT, {"parallel_tool_calls": True, "metadata": {"a": "b"}, "user": "u", "store": False}),
        (CHAT, {"tool_choice": "auto", "separate_reasoning": True, "stream_reasoning": True}),
        (COMPLETION, {"metadata": {"a": "b"}, "user": "u", "store": False, "detokenize": True, "best_of": 1}),
        (GENERATE, {"log_metrics": True, "priority": 0}),
        (EMBEDDINGS, {"priority": 0, "embed_dtype": "float32", "truncation_side": "left"}),
    ],
)
async def test_documented_neutral_values_are_taken(path: str, fields: dict[str, Any]) -> None:
    async with serving() as server:
        response = await server.post(path, **BODIES[path], **fields)
        assert response.status_code == 200, response.text


@every(
    ("path", "field", "value"),
    [(CHAT, "store", True), (GENERATE, "log_metrics", False), (COMPLETION, "detokenize", False)],
)
async def test_the_value_that_asks_for_something_is_refused(path: str, field: str, value: object) -> None:
    async with serving() as server:
        response = await server.post(path, **BODIES[path], **{field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_usage_in_every_chunk() -> None:
    async with serving() as server:
        options = {"continuous_usage_stats": True, "include_usage": True}
        for path in (COMPLETION, CHAT):
            *chunks, last, end = await server.stream(path, **BODIES[path], stream_options=options)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert {1, 2} <= {*counts}
            assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
            assert (last["choices"], last["usage"]["completion_tokens"], end) == ([], 2, "[DONE]")
        only = await server.stream(COMPLETION, **BODIES[COMPLETION], stream_options={"continuous_usage_stats": True})
        assert all(chunk["choices"] and chunk["usage"] for chunk in only[:-1])


async def test_seeds_may_be_negative_and_minus_one_draws_one() -> None:
    async with serving() as server:
        for seed in (-7, -7, -8, -1, -1, -(2**63)):
            assert (await server.post(COMPLETION, prompt="a", max_tokens=1, seed=seed)).status_code == 200
        seven, again, eight, drawn, other, _ = [spec.params.seed for spec in sent(server.engine)]
        assert seven == again
        assert len({seven, eight, drawn, other}) == 4
        assert all(0 <= spec.params.seed < 2**63 for spec in sent(server.engine))
    assert len({*seeds_for(-7, 4)}) == 4


async def test_top_k_zero_keeps_all_tokens() -> None:
    async with serving() as server:
        await server.post(COMPLETION, prompt="a", top_k=0)
        await server.post(GENERATE, text="a", sampling_params={"top_k": -1})
        assert [spec.params.top_k for spec in sent(server.engine)] == [-1, -1]


@every("path", [COMPLETION, CHAT, GENERATE, EMBEDDINGS])
async def test_salts_separate_the_prefix_cache(path: str) -> None:
    salts: list[dict[str, str]] = [{}, {"cache_salt": ""}, {"cache_salt": "a"}, {"extra_key": "a"}]
    async with serving() as server:
        for salt in (*salts, {"cache_salt": "a"}, {"cache_salt": "a", "extra_key": "b"}):
            assert (await server.post(path, **BODIES[path], **salt)).status_code == 200
        spaces = [spec.namespace for spec in sent(server.engine)]
        assert spaces[:2] == ["", ""]
        assert spaces[2] == spaces[4]
        assert len({*spaces}) == 4


async def test_a_batch_of_generate_has_a_salt_per_prompt() -> None:
    async with serving() as server:
        await server.post(GENERATE, text=["a", "b"], cache_salt=["x", "y"])
        first, second = [spec.namespace for spec in sent(server.engine)]
        assert first != second


@every("stream", [False, True])
async def test_token_ids_of_prompt_and_output(stream: bool) -> None:
    engine = FakeEngine(script=lambda message: [*"é!".encode(), EOS])
    async with serving(engine) as server:
        for path in (COMPLETION, CHAT):
            body = {**BODIES[path], "max_tokens": 9, "return_token_ids": True}
            if stream:
                chunks = [chunk for chunk in (await server.stream(path, **body))[:-1] if chunk["choices"]]
            else:
                chunks = [(await server.post(path, **body)).json()]
            ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
            assert ids == [*"é!".encode(), EOS]
            holders = chunks if path == CHAT else [chunk["choices"][0] for chunk in chunks]
            prompts = [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
            assert prompts == [list(sent(engine)[-1].tokens)]
            assert "token_ids" not in (await server.post(path, **BODIES[path])).json()["choices"][0]


async def test_bad_words_reach_the_engine_as_token_sequences() -> None:
    async with serving() as server:
        await server.post(COMPLETION, prompt="a", bad_words=["ab", " c", "ab"], allowed_token_ids=[97, 98, 99])
        await server.post(GENERATE, text="a", sampling_params={"bad_words": ["x"]})
        first, second = [spec.params for spec in sent(server.engine)]
        assert first.banned == (tuple(b"ab"), tuple(b" ab"), tuple(b" c"))
        assert first.allowed_token_ids == (97, 98, 99)
        assert second.banned == (tuple(b"x"), tuple(b" x"))


async def test_prompts_lose_tokens_at_their_start() -> None:
    async with serving(text=ByteTokenizer(adds_bos=True)) as server:
        answer = await server.post(
            COMPLETION, prompt=["abcdef", "xy"], truncate_prompt_tokens=3, echo=True, max_tokens=1
        )
        assert [choice["text"][:-1] for choice in answer.json()["choices"]] == ["def", "xy"]
        await server.post(COMPLETION, prompt=[1, 2, 3, 4], truncate_prompt_tokens=2)
        await server.post(CHAT, messages=HELLO, truncate_prompt_tokens=4, max_tokens=1)
        await server.post(EMBEDDINGS, input="abcdef", truncate_prompt_tokens=2)
        tokens = [bytes(token for token in spec.tokens if token < 256) for spec in sent(server.engine)]
        assert tokens[0] == b"def"
        assert tokens[2:] == [bytes([3, 4]), b"nt: ", b"ef"]


@every("prompt", ["word " * 200, [97] * 1000])
async def test_minus_one_keeps_what_fits(prompt: object) -> None:
    """The context of the server has 256 tokens."""
    async with serving() as server:
        refused = await server.post(COMPLETION, prompt=prompt, max_tokens=6)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        response = await server.post(COMPLETION, prompt=prompt, max_tokens=6, truncate_prompt_tokens=-1)
        assert response.json()["usage"] == {
            "prompt_tokens": 250,
            "completion_tokens": 6,
            "total_tokens": 256,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_the_fingerprint_is_in_every_object_and_default_is_the_served_model() -> None:
    async with serving(system_fingerprint="fp_12") as server:
        for path in (COMPLETION, CHAT):
            answer = (await server.post(path, **BODIES[path], model="default")).json()
            assert (answer["system_fingerprint"], answer["model"]) == ("fp_12", MODEL)
            chunks = (await server.stream(path, **BODIES[path]))[:-1]
            assert {chunk["system_fingerprint"] for chunk in chunks} == {"fp_12"}


async def test_paths_of_other_servers() -> None:
    async with serving() as server:
        assert (await server.http.get("/v1/models/")).json() == (await server.http.get("/v1/models")).json()
        assert (await server.http.get("/v1/models/default")).json()["id"] == MODEL
        assert (await server.http.get("/ping")).status_code == 200
        assert (await server.http.get("/version")).json()["version"]
        server.engine.die()
        await eventually(lambda: not server.client.alive)
        assert (await server.http.get("/ping")).status_code == 503


async def test_chat_prompt_logprobs_are_at_the_top() -> None:
    async with serving() as server:
        body = {**BODIES[CHAT], "n": 2, "prompt_logprobs": 1}
        answer = (await server.post(CHAT, **body)).json()
        assert answer["prompt_logprobs"][0] is None
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert all("prompt_logprobs" not in choice for choice in answer["choices"])
        chunks = (await server.stream(CHAT, **body))[:-1]
        assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [
            answer["prompt_logprobs"]
        ]


async def test_a_prompt_with_a_suffix_is_marked_as_the_model_knows_it() -> None:
    marks = FillIn("own", "<", "|", ">")
    async with serving(fill_in=marks) as server:
        answer = await server.post(COMPLETION, prompt=["a", "b"], suffix="c", max_tokens=1)
        assert answer.status_code == 200
        assert [bytes(spec.tokens) for spec in sent(server.engine)] == [b"<a|c>", b"<b|c>"]
        await server.post(COMPLETION, prompt="a", suffix="", max_tokens=1)
        assert bytes(sent(server.engine)[-1].tokens) == b"a"
        for more, param in (({"echo": True}, "echo"), ({"prompt": [1]}, "prompt")):
            refused = await server.post(COMPLETION, **{"prompt": "a", "suffix": "c", **more})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_the_tier_is_named_if_a_request_names_one() -> None:
    async with serving() as server:
        for path in (COMPLETION, CHAT):
            assert "service_tier" not in (await server.post(path, **BODIES[path])).json()
            assert (await server.post(path, **BODIES[path], service_tier="auto")).json()["service_tier"] == "default"
            chunks = (await server.stream(path, **BODIES[path], service_tier="default"))[:-1]
            assert {chunk["service_tier"] for chunk in chunks} == {"default"}
            refused = await server.post(path, **BODIES[path], service_tier="flex")
            assert refused.json()["error"]["param"] == "service_tier"


async def test_the_card_of_the_model_has_what_clients_of_both_apis_read() -> None:
    async with serving(created=1_700_000_000) as server:
        models = (await server.http.get("/v1/models")).json()
        (card,) = models["data"]
        assert (card["object"], card["id"], card["created"], card["max_model_len"]) == (
            "model",
            MODEL,
            1_700_000_000,
            256,
        )
        assert (card["type"], card["display_name"], card["created_at"]) == ("model", MODEL, "2023-11-14T22:13:20Z")
        assert (models["object"], models["has_more"], models["first_id"]) == ("list", False, MODEL)
        assert (await server.http.get(f"/v1/models/{MODEL}")).json() == card


async def test_the_last_message_of_the_assistant_can_be_continued() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "It is "}]
    async with serving() as server:
        await server.post(CHAT, messages=begun, max_tokens=1, continue_final_message=True, add_generation_prompt=False)
        await server.post(CHAT, messages=begun, max_tokens=1, continue_final_message=False)
        prompts = [bytes(spec.tokens) for spec in sent(server.engine)]
        assert prompts == [b"user: hi\nassistant: It is", b"user: hi\nassistant: It is \nassistant: "]
        for messages, more in ((HELLO, {}), (begun, {"add_generation_prompt": True})):
            refused = await server.post(CHAT, messages=messages, continue_final_message=True, **more)
            assert refused.json()["error"]["param"] == "continue_final_message"


async def test_a_system_message_that_the_template_refuses_is_the_users() -> None:
    class Strict(ByteTokenizer):
        def apply_chat_template(self, messages: list[dict[str, object]], **more: Any) -> str:
            if any(message["role"] == "system" for message in messages[1:]):
                raise RequestError("the system message must come first", code="chat_template_error")
            return super().apply_chat_template(messages, **more)

    messages = [{"role": "system", "content": "S"}, *HELLO, {"role": "developer", "content": "D"}]
    async with serving(text=Strict()) as server:
        assert (await server.post(CHAT, messages=messages, max_tokens=1)).status_code == 200
        assert bytes(sent(server.engine)[0].tokens) == b"system: S\nuser: hi\nD\nassistant: "
