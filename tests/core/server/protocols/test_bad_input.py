"""Invalid input gets a clear 4xx in OpenAI's format and does not reach the engine, and the server keeps serving."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import msgspec
import pytest
from every import every
from server_support import MODEL, STORED_FILE, serving, settings_for

from srv.errors import RequestError
from srv.server.app import REQUEST_BODIES
from srv.server.http.body import BodyLimits, parse
from srv.server.protocols.native.fields import NativeSampling
from srv.server.protocols.openai.fields import ChatMessage, StreamOptions
from srv.server.request.fields import RequestBody, field_table
from srv.server.request.neutral import NEUTRAL, NOTHING

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hi"}]
COMPLETION, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
LIMITS = BodyLimits()
NESTED: dict[str, type[RequestBody]] = {
    "messages[]": ChatMessage,
    "stream_options": StreamOptions,
    "sampling_params": NativeSampling,
}
MINIMAL: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "a"},
    CHAT: {"messages": HELLO},
    EMBEDDINGS: {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/classify": {"input": "a"},
    "/classify": {"input": "a"},
    "/generate": {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/abort_request": {"abort_all": True},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a"},
    MESSAGES: {"model": MODEL, "max_tokens": 2, "messages": HELLO},
    COUNT_TOKENS: {"model": MODEL, "messages": HELLO},
    "/start_profile": {},
    "/pause_generation": {},
    "/continue_generation": {},
    "/set_log_level": {"level": "info"},
    "/v1/batches": {"input_file_id": STORED_FILE, "endpoint": COMPLETION, "completion_window": "24h"},
}
ANY_OBJECT = ("chat_template_kwargs", "metadata", "client_metadata", "cache_control")


@every(
    ("path", "body", "param", "part"),
    [
        (COMPLETION, {}, "prompt", "required"),
        (COMPLETION, {"prompt": None}, "prompt", "null"),
        (COMPLETION, {"prompt": 3}, "prompt", "an integer"),
        (COMPLETION, {"prompt": ""}, "prompt", "empty"),
        (COMPLETION, {"prompt": []}, "prompt", "no tokens"),
        (COMPLETION, {"prompt": ["a", ""]}, "prompt[1]", "empty"),
        (COMPLETION, {"prompt": ["a", 1]}, "prompt", "it contains a string and an integer"),
        (COMPLETION, {"prompt": [True]}, "prompt", "it contains a boolean"),
        (COMPLETION, {"prompt": [1.5]}, "prompt", "it contains a number"),
        (COMPLETION, {"prompt": [[1], ["a"]]}, "prompt[1]", "integers"),
        (COMPLETION, {"prompt": [-1]}, "prompt", "-1"),
        (COMPLETION, {"prompt": [260]}, "prompt", "0 to 259"),
        (COMPLETION, {"prompt": [10**30]}, "prompt", "vocabulary"),
        (COMPLETION, {"prompt": "a" * 256}, "prompt", "context is 256"),
        (COMPLETION, {"prompt": "a" * 100, "max_tokens": 157}, "max_tokens", "at most 156"),
        (COMPLETION, {"prompt": "a", "max_tokens": -1}, "max_tokens", "-1"),
        (COMPLETION, {"prompt": "a", "max_tokens": 10**30}, "max_tokens", "less than"),
        (COMPLETION, {"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
        (COMPLETION, {"prompt": "a", "max_tokens": "3"}, "max_tokens", "integer"),
        (COMPLETION, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "integer"),
        (COMPLETION, {"prompt": "a", "min_tokens": 20, "max_tokens": 10}, "min_tokens", "greater than max_tokens"),
        (COMPLETION, {"prompt": "a", "temperature": -0.1}, "temperature", "-0.1"),
        (COMPLETION, {"prompt": "a", "temperature": 1e30}, "temperature", "less than or equal"),
        (COMPLETION, {"prompt": "a", "temperature": "hot"}, "temperature", '"hot"'),
        (COMPLETION, {"prompt": "a", "temperature": True}, "temperature", "number"),
        (COMPLETION, {"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
        (COMPLETION, {"prompt": "a", "top_p": 1.1}, "top_p", "1.1"),
        (COMPLETION, {"prompt": "a", "top_k": -2}, "top_k", "-1"),
        (COMPLETION, {"prompt": "a", "top_k": -(10**12)}, "top_k", "-1"),
        (COMPLETION, {"prompt": "a", "min_p": 2}, "min_p", "2"),
        (COMPLETION, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "0.01"),
        (COMPLETION, {"prompt": "a", "frequency_penalty": 3}, "frequency_penalty", "2"),
        (COMPLETION, {"prompt": "a", "presence_penalty": -3}, "presence_penalty", "-2"),
        (COMPLETION, {"prompt": "a", "seed": -(2**63) - 1}, "seed", "greater than"),
        (COMPLETION, {"prompt": "a", "bad_words": [""]}, "bad_words", "1 to 128"),
        (COMPLETION, {"prompt": "a", "bad_words": ["a"] * 129}, "bad_words", "at most 128"),
        (COMPLETION, {"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids", "vocabulary"),
        (
            COMPLETION,
            {"prompt": "a", "allowed_token_ids": [97], "bad_words": ["a"]},
            "allowed_token_ids",
            "bad_words excludes all",
        ),
        (
            COMPLETION,
            {"prompt": "a", "allowed_token_ids": [97], "stop_token_ids": [97], "min_tokens": 1},
            "allowed_token_ids",
            "stop_token_ids excludes all",
        ),
        (COMPLETION, {"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than"),
        (COMPLETION, {"prompt": "a", "truncate_prompt_tokens": 0}, "prompt", "is empty"),
        (COMPLETION, {"prompt": "a", "cache_salt": "s" * 257}, "cache_salt", "at most 256"),
        (COMPLETION, {"prompt": "a", "seed": 2**63}, "seed", "less than"),
        (COMPLETION, {"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        (COMPLETION, {"prompt": "a", "n": 129}, "n", "128"),
        (COMPLETION, {"prompt": ["a"] * 20, "n": 100}, "prompt", "1024"),
        (COMPLETION, {"prompt": "a", "stop": ""}, "stop", "empty"),
        (COMPLETION, {"prompt": "a", "stop": ["a", ""]}, "stop", "empty"),
        (COMPLETION, {"prompt": "a", "stop": [1]}, "stop", "strings"),
        (COMPLETION, {"prompt": "a", "stop": ["a"] * 17}, "stop", "16"),
        (COMPLETION, {"prompt": "a", "stop": "a" * 2000}, "stop", "1024"),
        (COMPLETION, {"prompt": "a", "stop_token_ids": ["a"]}, "stop_token_ids", "integers"),
        (COMPLETION, {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", "999"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias", '"a"'),
        (COMPLETION, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "101"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"1": True}}, "logit_bias", "-100 to 100"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "999"),
        (COMPLETION, {"prompt": "a", "logit_bias": [1]}, "logit_bias", "object"),
        (COMPLETION, {"prompt": "a", "logprobs": 21}, "logprobs", "20"),
        (COMPLETION, {"prompt": "a", "logprobs": True}, "logprobs", "integer"),
        (COMPLETION, {"prompt": "a", "stream": 1}, "stream", "true or false"),
        (COMPLETION, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
        (COMPLETION, {"prompt": "a", "temprature": 1}, "temprature", "did you mean temperature"),
        (COMPLETION, {"prompt": "a", "max_new_tokens": 1}, "max_new_tokens", "called max_tokens"),
        (COMPLETION, {"prompt": "a", "z" * 500: 1}, "z" * 80 + "... (500 characters)", "remove it"),
        (COMPLETION, {"prompt": "a", "suffix": "b"}, "suffix", "--completion-template"),
        (COMPLETION, {"prompt": "a", "suffix": 1}, "suffix", "string"),
        (COMPLETION, {"prompt": "a", "best_of": 2}, "best_of", "not implemented"),
        (COMPLETION, [], None, "JSON object"),
        (CHAT, {}, "messages", "required"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": "hi"}, "messages", "array"),
        (CHAT, {"messages": ["hi"]}, "messages[0]", "object"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "null"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "integer"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "nme": "y"}]}, "messages[0].nme", "messages[0].name"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            '"image_url" is not implemented; send text',
        ),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_schema"}},
            "response_format",
            "the schema in json_schema.schema",
        ),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}},
            "response_format",
            "a text as json_schema.name, not an integer",
        ),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "text"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "context is 256"),
        (CHAT, {"messages": HELLO * 300}, "messages", "300"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function", "is required"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "--tool-call"),
        (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, "functions", "use tools"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "has no tools"),
        (CHAT, {"messages": HELLO, "tool_choice": "maybe"}, "tool_choice", '"auto"'),
        (CHAT, {"messages": HELLO, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must have the form"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "none"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs = true"),
        (COMPLETION, {"prompt": "a", "max_completion_tokens": 1}, "max_completion_tokens", "called max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 10**6}, "max_completion_tokens", "request at most"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "at least 1"),
        (
            CHAT,
            {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            "the server sets it",
        ),
        (
            CHAT,
            {"messages": HELLO, "stream": True, "stream_options": {"include_use": True}},
            "stream_options.include_use",
            "did you mean stream_options.include_usage",
        ),
        (CHAT, {"messages": HELLO, "rid": 3}, "rid", "string"),
        (EMBEDDINGS, {}, "input", "required"),
        (EMBEDDINGS, {"input": None}, "input", "null"),
        (EMBEDDINGS, {"input": ""}, "input", "empty"),
        (EMBEDDINGS, {"input": []}, "input", "no tokens"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input[1]", "empty"),
        (EMBEDDINGS, {"input": [{"text": "a"}]}, "input", "it contains an object"),
        (EMBEDDINGS, {"input": [[1], [1.5]]}, "input[1]", "integers"),
        (EMBEDDINGS, {"input": [260]}, "input", "0 to 259"),
        (EMBEDDINGS, {"input": "a" * 257}, "input", "input has 257 tokens, but the model's context is 256 tokens"),
        (EMBEDDINGS, {"input": ["a"] * 1025}, "input", "1025 prompts, the limit is 1024"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        (EMBEDDINGS, {"input": "a", "dimensions": 5}, "dimensions", "have 4 elements"),
        (EMBEDDINGS, {"input": "a", "dimensions": 2.0}, "dimensions", "integer"),
        (EMBEDDINGS, {"input": "a", "normalize": 1}, "normalize", "true or false"),
        (EMBEDDINGS, {"input": "a", "rid": ""}, "rid", "at least 1"),
        (EMBEDDINGS, {"input": "a", "max_tokens": 1}, "max_tokens", "unknown field"),
        (EMBEDDINGS, {"prompt": "a"}, "prompt", "called input"),
        ("/tokenize", {}, "prompt", "either"),
        ("/tokenize", {"prompt": [1]}, "prompt", "texts"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "messages"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "messages"),
        ("/tokenize", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function", "is required"),
        ("/detokenize", {"tokens": "a"}, "tokens", "token ids"),
        ("/detokenize", {"tokens": [999]}, "tokens", "999"),
        ("/detokenize", {}, "tokens", "required"),
        ("/abort_request", {}, "rid", "either"),
        ("/abort_request", {"rid": 3}, "rid", "string"),
    ],
)  # fmt: skip
async def test_an_invalid_value_is_a_400_that_names_the_field(
    path: str, body: Any, param: str | None, part: str
) -> None:
    async with serving() as server:
        response = await server.http.post(path, json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error
        assert part in error["message"]
        assert not server.engine.received
        assert (await server.post(COMPLETION, prompt="a")).status_code == 200


async def test_all_problems_are_reported_together() -> None:
    async with serving() as server:
        response = await server.post(CHAT, messages=HELLO, temperature=-1, top_p=7, functions=[1])
        message = response.json()["error"]["message"]
        assert "temperature = -1" in message
        assert "top_p = 7" in message
        assert "functions is not implemented" in message
        assert ".;" not in message
        assert " it must be greater than or equal to 0. 0 is greedy sampling. top_p = 7" in message


async def test_error_text_names_the_value_the_reason_and_the_remedy() -> None:
    async with serving() as server:
        response = await server.post(COMPLETION, prompt="a", temperature=-1)
        assert response.json() == {
            "error": {
                "message": "temperature = -1 is refused: it must be greater than or equal to 0. 0 is greedy sampling.",
                "type": "invalid_request_error",
                "param": "temperature",
                "code": "invalid_value",
            }
        }


async def test_a_request_that_cannot_fit_the_kv_pool_is_refused() -> None:
    async with serving(max_request_tokens=64) as server:
        prompt = await server.post(COMPLETION, prompt="a" * 64)
        output = await server.post(COMPLETION, prompt="a" * 32, max_tokens=33)
        for response in (prompt, output):
            assert response.json()["error"]["code"] == "request_too_large"
            assert "KV pool holds 64 tokens" in response.json()["error"]["message"]
        assert (await server.post(COMPLETION, prompt="a" * 32, max_tokens=32)).status_code == 200


async def test_unknown_model_and_path_and_wrong_method() -> None:
    async with serving() as server:
        for path in (COMPLETION, CHAT, EMBEDDINGS, "/tokenize"):
            response = await server.post(path, model="gpt-9", **MINIMAL[path])
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "model_not_found"
            assert MODEL in response.json()["error"]["message"]
        unknown = await server.http.get("/v2/nothing")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_path")
        method = await server.http.get(COMPLETION)
        assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
        assert method.headers["allow"] == "POST"


@every(
    ("body", "code", "part"),
    [
        (b"", "invalid_json", "empty"),
        (b"{", "invalid_json", "JSON"),
        (b'{"prompt": "a",}', "invalid_json", "trailing comma"),
        (b'{"prompt": "a"} x', "invalid_json", "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "temperature = NaN is refused"),
        (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json", "temperature = -Infinity is refused"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_json", "out of range"),
        (b'{"prompt": "a", "seed": ' + b"9" * 6000 + b"}", "invalid_json", "out of range"),
        (b'{"prompt": "\xff\xfe"}', "invalid_utf8", "UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "invalid_utf8", "UTF-8"),
        (b'{"prompt": "NaN", "stop": [Infinity]}', "invalid_json", "a value = Infinity is refused"),
        (b'{"prompt": "\\ud800"}', "invalid_json", "it contains a lone surrogate"),
        (b"[" * 8_000, "invalid_json", "nested"),
        (b"[" * 17_000, "too_many_values", "split"),
        (b'{"prompt": [' + b"1," * 300_000 + b"1]}", "too_many_values", "131072"),
    ],
)
async def test_invalid_json(body: bytes, code: str, part: str) -> None:
    async with serving() as server:
        response = await server.http.post(COMPLETION, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == code
        assert part in response.json()["error"]["message"]


def test_commas_and_brackets_in_strings_do_not_count_as_values() -> None:
    text = 'a,[{"\\' * 100_000
    assert parse(msgspec.json.encode({"prompt": text}), LIMITS) == {"prompt": text}
    with pytest.raises(RequestError, match="more than 10 JSON values"):
        parse(msgspec.json.encode({"x": ["a" * 20_000, *range(11)]}), BodyLimits(values=10))
    with pytest.raises(RequestError, match="cannot be read as JSON"):
        parse(b'{"x": "' + b"y" * 20_000, LIMITS)


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    async with serving(max_prompt_bytes=1000) as server:
        for body, path in (({"prompt": "é" * 501}, COMPLETION), ({"prompt": "a" * 1001}, "/tokenize")):
            response = await server.post(path, **body)
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert "1000" in response.json()["error"]["message"]


async def test_a_missing_chat_template_is_reported() -> None:
    async with serving() as server:
        server.app.state.service.text.has_chat_template = False
        response = await server.post(CHAT, messages=HELLO)
        assert response.json()["error"]["code"] == "no_chat_template"


# ---- all fields of all schemas ----------------------------------------------------------------------------------


def _refused() -> list[tuple[str, str]]:
    return [
        (path, row.name)
        for path, model in REQUEST_BODIES.items()
        for row in field_table(model)
        if row.status == "refused"
    ]


@every(("path", "name"), _refused())
async def test_every_refused_field_is_named_and_its_neutral_values_are_accepted(path: str, name: str) -> None:
    async with serving(**settings_for(path)) as server:
        response = await server.post(path, **MINIMAL[path], **{name: {"ask": "something"}})
        error = response.json()["error"]
        if path in (MESSAGES, COUNT_TOKENS):  # whose errors have neither a field nor a code
            assert f"{name} is not implemented" in error["message"]
        else:
            assert (response.status_code, error["param"], error["code"]) == (400, name, "not_implemented")
        assert not server.engine.received
        for neutral in NEUTRAL.get(name, NOTHING):
            response = await server.post(path, **MINIMAL[path], **{name: neutral})
            assert response.status_code == 200, (neutral, response.text)


@every("path", REQUEST_BODIES)
async def test_every_other_field_refuses_a_value_of_the_wrong_type(path: str) -> None:
    """No field is silently ignored: each one validates its value."""
    wrong = {"not": "this"}
    async with serving(**settings_for(path)) as server:
        for row in field_table(REQUEST_BODIES[path]):
            if row.status == "refused" or row.name in ANY_OBJECT:
                continue
            minimal = {} if row.name == "input_ids" else MINIMAL[path]
            response = await server.post(path, **{**minimal, row.name: wrong})
            assert response.status_code in (400, 404), row.name
            error = response.json()["error"]
            assert row.name in (error["param"] if "param" in error else error["message"]), row.name


@every(("where", "model"), NESTED.items())
def test_refused_fields_of_nested_bodies_are_named(where: str, model: type[RequestBody]) -> None:
    minimal = {"role": "user", "content": "x"} if model is ChatMessage else {}
    for row in field_table(model):
        if row.status == "refused":
            with pytest.raises(RequestError) as caught:
                model.parse({**minimal, row.name: {"ask": 1}}, where)
            assert caught.value.param == f"{where}.{row.name}"
            assert caught.value.code == "not_implemented"


@every("model", [*REQUEST_BODIES.values(), *NESTED.values()])
def test_every_field_has_a_status_and_a_description(model: type[RequestBody]) -> None:
    for row in field_table(model):
        assert row.status in ("implemented", "no_effect", "refused")
        assert len(row.reason) > 3, f"{model.__name__}.{row.name} has no description"


@every("name", ["user", "safety_identifier", "prompt_cache_key"])
async def test_fields_without_effect_are_accepted(name: str) -> None:
    async with serving() as server:
        assert (await server.post(CHAT, messages=HELLO, **{name: "u1"})).status_code == 200


def test_all_openai_parameters_are_known() -> None:
    """Every parameter of the installed openai client is a field here, implemented or refused by name."""
    completions = pytest.importorskip("openai.resources.chat.completions", reason="needs the openai client")
    plain = pytest.importorskip("openai.resources.completions", reason="needs the openai client")
    embeddings = pytest.importorskip("openai.resources.embeddings", reason="needs the openai client")
    client_options = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    methods = {
        CHAT: completions.Completions.create,
        COMPLETION: plain.Completions.create,
        EMBEDDINGS: embeddings.Embeddings.create,
    }
    for path, method in methods.items():
        assert set(inspect.signature(method).parameters) - client_options <= set(REQUEST_BODIES[path].model_fields)


@every(
    ("path", "field"), [(COMPLETION, "prompt"), (EMBEDDINGS, "input"), ("/tokenize", "prompt"), ("/generate", "text")]
)
async def test_long_text_is_tokenized_outside_the_event_loop(path: str, field: str) -> None:
    """The tokenizer waits for the event loop to make progress, which would block forever on the loop itself."""
    async with serving(max_prompt_bytes=10_000) as server:
        moved_on = threading.Event()
        text = server.app.state.service.text

        def slow(value: str, add_special_tokens: bool = True) -> list[int]:
            assert moved_on.wait(10), "the event loop is blocked"
            return [1] * 300

        text.encode = slow
        request = asyncio.create_task(server.post(path, **{field: "x" * 3000 + "é" * 100 + "x" * 2000}))
        await asyncio.sleep(0.05)
        assert not request.done()
        moved_on.set()
        assert (await request).status_code in (200, 400)
