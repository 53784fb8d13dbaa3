"""What clients of OpenAI's, Anthropic's, vLLM's and SGLang's APIs rely on, as a table: calls, and what must be true.

Sources: the API references of OpenAI and Anthropic, the documentation of vLLM's and SGLang's servers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from api_calls import Call, Caller, all_are, assertions, contains, has, named, starts, variants
from e2e_support import Server

pytestmark = [pytest.mark.e2e, pytest.mark.proof(minutes=0.05), pytest.mark.xdist_group("assertions")]

SERVER_ARGUMENTS = (
    "--max-total-tokens",
    "16384",
    "--is-embedding",
    "--tool-call-parser",
    "hermes",
    "--reasoning-parser",
    "qwen3",
)
PROCESSOR_ARGUMENTS = ("--dtype", "float32")
OPENAI_ERROR = {
    "": has("error"),
    "error": has("message", "type", "param", "code"),
    "error.message": str,
    "header:content-type": starts("application/json"),
}
ANTHROPIC_ERROR = {"": has("type", "error", "request_id"), "type": "error", "error": has("type", "message")}
NUMBER = named("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
NONE = named("null", lambda value: value is None)
POSITIVE = named("a positive number", lambda value: value > 0)


def refused(code: str, param: str | None = None, status: int = 400) -> dict[str, Any]:
    kind = {404: "not_found_error"}.get(status, "invalid_request_error")
    must = {"status": status, **OPENAI_ERROR, "error.code": code, "error.type": kind}
    return must if param is None else {**must, "error.param": param, "error.message": contains(param)}


def rejected(part: str, kind: str = "invalid_request_error", status: int = 400) -> dict[str, Any]:
    """Anthropic's form."""
    return {"status": status, **ANTHROPIC_ERROR, "error.type": kind, "error.message": contains(part)}


def fields(**more: Any) -> str:
    return json.dumps(more)


SAMPLING_ERRORS = {
    '{"temperature": -1}': refused("invalid_value", "temperature"),
    '{"temperature": "hot"}': refused("invalid_type", "temperature"),
    '{"temperature": true}': refused("invalid_type", "temperature"),
    '{"top_p": 0}': refused("invalid_value", "top_p"),
    '{"top_p": 1.5}': refused("invalid_value", "top_p"),
    '{"top_k": 1.5}': refused("invalid_type", "top_k"),
    '{"min_p": 2}': refused("invalid_value", "min_p"),
    '{"presence_penalty": 3}': refused("invalid_value", "presence_penalty"),
    '{"frequency_penalty": -3}': refused("invalid_value", "frequency_penalty"),
    '{"repetition_penalty": 0}': refused("invalid_value", "repetition_penalty"),
    '{"n": 0}': refused("invalid_value", "n"),
    '{"n": "2"}': refused("invalid_type", "n"),
    '{"seed": "a"}': refused("invalid_type", "seed"),
    '{"stop": ""}': refused("invalid_value", "stop"),
    '{"stop": 5}': {"status": 400, "error.param": "stop"},
    '{"stop_token_ids": [-1]}': {"status": 400, "error.param": starts("stop_token_ids")},
    '{"logit_bias": {"x": 1}}': {"status": 400, "error.param": starts("logit_bias")},
    '{"logit_bias": {"1": 101}}': {"status": 400, "error.param": starts("logit_bias")},
    '{"logit_bias": {"99999999": 1}}': {"status": 400, "error.param": starts("logit_bias")},
    '{"allowed_token_ids": [99999999]}': {"status": 400, "error.param": starts("allowed_token_ids")},
    '{"max_tokens": -1}': refused("invalid_value", "max_tokens"),
    '{"max_tokens": 1.5}': refused("invalid_type", "max_tokens"),
    '{"max_tokens": 1000000}': {"status": 400, "error.message": contains("max_tokens")},
    '{"min_tokens": 9, "max_tokens": 2}': {"status": 400, "error.message": contains("min_tokens")},
    '{"stream": "yes"}': refused("invalid_type", "stream"),
    '{"stream_options": {"include_usage": true}}': refused("invalid_value", "stream_options"),
    '{"nonsense": 1}': refused("unknown_field", "nonsense"),
    '{"temprature": 1}': {**refused("unknown_field", "temprature"), "error.message": contains("temperature?")},
    '{"use_beam_search": true}': {"status": 400, "error.param": "use_beam_search"},
    '{"priority": 7}': {"status": 400, "error.param": "priority"},
    '{"model": "gpt-9"}': refused("model_not_found", "model", 404),
}
TAKEN = {  # without a visible effect on these calls, or asking for nothing
    '{"user": "u", "seed": 5}': {},
    '{"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}': {},
    '{"top_k": 5, "top_p": 0.9, "min_p": 0.01, "temperature": 0.5}': {},
    '{"n": null, "stop": null, "logit_bias": null, "seed": null, "stream": null}': {"choices.#": 1},
    '{"priority": 0}': {},
    '{"ignore_eos": true, "min_tokens": 2}': {"usage.completion_tokens": 4},
    '{"skip_special_tokens": false, "spaces_between_special_tokens": true}': {},
    '{"truncate_prompt_tokens": 2}': {"usage.prompt_tokens": 2},
    '{"bad_words": ["zzz"]}': {},
    '{"rid": "mine"}': {},
    '{"max_tokens": 1}': {"usage.completion_tokens": 1, "choices.0.finish_reason": "length"},
    '{"n": 2}': {"choices.#": 2, "choices.*.index": [0, 1], "usage.completion_tokens": 8},
    '{"include_stop_str_in_output": true}': {},
    '{"cache_salt": "a"}': {},
}
BODY_ERRORS = {
    "{": refused("invalid_json"),
    "": refused("invalid_json"),
    "[]": refused("invalid_type"),
    "null": refused("invalid_type"),
    '{"temperature": NaN}': refused("invalid_json"),
    '{"user": "\\ud83d"}': refused("invalid_json"),
}

# ---- completions

STORY = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
WHOLE_COMPLETION = {
    "": has("id", "object", "created", "model", "system_fingerprint", "choices", "usage"),
    "id": starts("cmpl-"),
    "object": "text_completion",
    "created": int,
    "model": "{model}",
    "choices.#": 1,
    "choices.0.index": 0,
    "choices.0.text": str,
    "choices.0.finish_reason": "length",
    "choices.0.logprobs": NONE,
    "usage.prompt_tokens": 4,
    "usage.completion_tokens": 4,
    "usage.total_tokens": 8,
    "usage.prompt_tokens_details.cached_tokens": int,
    "header:content-type": "application/json",
}
COMPLETIONS = [
    Call("/v1/completions", STORY, WHOLE_COMPLETION, save={"story": "choices.0.text"}),
    *(Call("/v1/completions", body, must) for body, must in BODY_ERRORS.items()),
    Call("/v1/completions/", STORY, refused("unknown_path", status=404)),
    Call("GET /v1/completions", None, {**refused("method_not_allowed", status=405), "header:allow": "POST"}),
    *variants("/v1/completions", STORY, SAMPLING_ERRORS),
    *variants("/v1/completions", STORY, TAKEN),
    *variants(
        "/v1/completions",
        STORY,
        {
            '{"model": "default"}': {"model": "{model}", "choices.0.text": "{story}"},
            '{"prompt": ["Once upon a time", "a"]}': {"choices.*.index": [0, 1], "choices.0.text": "{story}"},
            '{"prompt": [81, 278]}': {"choices.#": 1, "usage.prompt_tokens": 2},
            '{"prompt": [[81], [278, 81]]}': {"choices.#": 2, "usage.prompt_tokens": 3},
            '{"prompt": ["a", "b"], "n": 2}': {"choices.*.index": [0, 1, 2, 3]},
            '{"prompt": ""}': refused("empty_prompt", "prompt"),
            '{"prompt": []}': {"status": 400, "error.param": "prompt"},
            '{"prompt": 5}': {"status": 400, "error.param": "prompt"},
            '{"prompt": null}': {"status": 400, "error.param": "prompt"},
            '{"prompt": [-1]}': {"status": 400, "error.param": starts("prompt")},
            '{"prompt": [99999999]}': {"status": 400, "error.param": starts("prompt")},
            '{"prompt": ["a", 5]}': {"status": 400, "error.param": starts("prompt")},
            '{"max_tokens": 0}': refused("invalid_value", "max_tokens"),
            '{"max_tokens": 0, "echo": true}': {"choices.0.text": "Once upon a time", "usage.completion_tokens": 0},
            '{"echo": true}': {"choices.0.text": "Once upon a time{story}"},
            '{"logprobs": 2}': {
                "choices.0.logprobs": has("tokens", "token_logprobs", "top_logprobs", "text_offset"),
                "choices.0.logprobs.tokens.#": 4,
                "choices.0.logprobs.token_logprobs": all_are(float),
                "choices.0.logprobs.top_logprobs.*.#": all_are(2),
                "choices.0.logprobs.text_offset.0": 0,
            },
            '{"logprobs": 0}': {"choices.0.logprobs.token_logprobs.#": 4},
            '{"logprobs": 2, "echo": true}': {
                "choices.0.logprobs.tokens.#": 8,
                "choices.0.logprobs.token_logprobs.0": NONE,
            },
            '{"logprobs": 1, "return_tokens_as_token_ids": true}': {
                "choices.0.logprobs.tokens": named("token_id:...", lambda value: value[0].startswith("token_id:"))
            },
            '{"logprobs": -1}': {"status": 400, "error.param": "logprobs"},
            '{"logprobs": true}': {"status": 400, "error.param": "logprobs"},
            '{"prompt_logprobs": 1}': {"choices.0.prompt_logprobs.#": 4, "choices.0.prompt_logprobs.0": NONE},
            '{"return_token_ids": true}': {"choices.0.token_ids.#": 4, "choices.0.prompt_token_ids.#": 4},
            '{"stop": " "}': {"choices.0.finish_reason": "stop", "choices.0.matched_stop": " "},
            '{"stop": ["zzz", " "]}': {"choices.0.finish_reason": "stop"},
            '{"stop": " ", "include_stop_str_in_output": true}': {
                "choices.0.text": named("... ", lambda t: t[-1] == " ")
            },
            '{"logit_bias": {"81": 100}}': {"choices.0.text": "aaaa"},
            '{"allowed_token_ids": [81]}': {"choices.0.text": "aaaa"},
            '{"stop_token_ids": [81], "logit_bias": {"81": 100}}': {"choices.0.finish_reason": "stop"},
            '{"structured_outputs": {"regex": "[0-9]{3}"}}': {"choices.0.text": named("digits", str.isdigit)},
            '{"structured_outputs": {"choice": ["yes", "no"]}}': {
                "choices.0.text": named("a choice", ["yes", "no"].__contains__)
            },
            '{"guided_regex": "[0-9]{3}"}': {"choices.0.text": named("digits", str.isdigit)},
            '{"regex": "[0-9]{3}"}': {"choices.0.text": named("digits", str.isdigit)},
            '{"structured_outputs": {"regex": "["}}': {"status": 400, "error.param": starts("structured_outputs")},
            '{"structured_outputs": {"regex": "a", "choice": ["b"]}}': {"status": 400},
            '{"suffix": "x"}': {"status": 400, "error.param": "suffix"},
            '{"best_of": 2}': refused("not_implemented", "best_of"),
            '{"max_completion_tokens": 2}': {
                **refused("unknown_field", "max_completion_tokens"),
                "error.message": contains("it is called max_tokens here"),
            },
            fields(prompt="a " * 9000): refused("context_length_exceeded", "prompt"),
            '{"logprobs": 200}': refused("invalid_value", "logprobs"),
            '{"stop": []}': {"choices.0.text": "{story}"},
            fields(stop=["x"] * 17): refused("invalid_value", "stop"),
            '{"best_of": 1}': {"choices.0.text": "{story}"},
            '{"lora_path": "a"}': {"status": 400, "error.param": "lora_path"},
        },
    ),
]
COMPLETION_STREAMS = list(
    variants(
        "/v1/completions",
        {**STORY, "stream": True},
        {
            "{}": {
                "header:content-type": starts("text/event-stream"),
                "header:cache-control": contains("no-cache"),
                "done": True,
                "names": [],
                "events.*.object": all_are("text_completion"),
                "events.0.model": "{model}",
                "events.*.id": named("one id", lambda ids: len(set(ids)) == 1),
                "events.-1.choices.0.finish_reason": "length",
                "events.0.choices.0.finish_reason": NONE,
                "events.0.choices.0.index": 0,
            },
            '{"stream_options": {"include_usage": true}}': {
                "events.-1.choices": [],
                "events.-1.usage.total_tokens": 8,
                "events.0.usage": NONE,
            },
            '{"stream_options": {"include_usage": true, "continuous_usage_stats": true}}': {
                "events.0.usage.prompt_tokens": 4
            },
            '{"n": 2}': {
                "events": named("both choices", lambda all_of: {e["choices"][0]["index"] for e in all_of} == {0, 1})
            },
            '{"logprobs": 1}': {"events.0.choices.0.logprobs.tokens.#": POSITIVE},
            '{"echo": true}': {"events.0.choices.0.text": starts("Once upon a time")},
            '{"temperature": -1}': refused("invalid_value", "temperature"),
            '{"stream_options": {"nonsense": true}}': {"status": 400, "error.param": "stream_options.nonsense"},
        },
    )
)

# ---- chat completions

HELLO = [{"role": "user", "content": "Say hello."}]
ASK = {"messages": HELLO, "max_tokens": 4, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["now"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
CALLED = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
WHOLE_CHAT = {
    "": has("id", "object", "created", "model", "system_fingerprint", "choices", "usage"),
    "id": starts("chatcmpl-"),
    "object": "chat.completion",
    "created": int,
    "model": "{model}",
    "choices.#": 1,
    "choices.0.index": 0,
    "choices.0.message.role": "assistant",
    "choices.0.message.content": str,
    "choices.0.message.refusal": NONE,
    "choices.0.logprobs": NONE,
    "choices.0.finish_reason": "length",
    "usage.completion_tokens": 4,
    "usage.completion_tokens_details.reasoning_tokens": 0,
}


CHAT = [
    Call("/v1/chat/completions", ASK, WHOLE_CHAT, save={"hello": "choices.0.message.content"}),
    *(Call("/v1/chat/completions", body, must) for body, must in BODY_ERRORS.items()),
    Call("GET /v1/chat/completions", None, {**refused("method_not_allowed", status=405), "header:allow": "POST"}),
    *variants("/v1/chat/completions", ASK, SAMPLING_ERRORS),
    *variants("/v1/chat/completions", ASK, {name: must for name, must in TAKEN.items() if "truncate" not in name}),
    *variants(
        "/v1/chat/completions",
        ASK,
        {
            '{"messages": []}': refused("invalid_value", "messages"),
            '{"messages": null}': {"status": 400, "error.param": "messages"},
            '{"messages": "hi"}': refused("invalid_type", "messages"),
            fields(messages=[{"role": "user"}]): {"status": 400, "error.param": starts("messages[0]")},
            fields(messages=[{"content": "a"}]): {"status": 400, "error.param": starts("messages[0]")},
            fields(messages=[{"role": "robot", "content": "a"}]): {"status": 400, "error.param": "messages[0].role"},
            fields(messages=[{"role": "user", "content": None}]): {"status": 400, "error.param": "messages[0].content"},
            fields(messages=[{"role": "user", "content": 5}]): {"status": 400, "error.param": "messages[0].content"},
            fields(messages=[{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]): {
                "choices.0.message.content": "{hello}"
            },
            fields(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]): {
                **refused("not_implemented", "messages[0].content[0].type")
            },
            fields(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]): {"status": 400},
            fields(messages=[{"role": "system", "content": "Be brief."}, *HELLO]): {"usage.prompt_tokens": POSITIVE},
            fields(messages=[{"role": "developer", "content": "Be brief."}, *HELLO]): {},
            fields(messages=[{**HELLO[0], "name": "Ann"}]): {},
            fields(messages=CALLED): {},
            fields(messages=CALLED[:1] + CALLED[2:]): {},
            fields(messages=[{"role": "tool", "content": "x"}]): {
                "status": 400,
                "error.param": "messages[0].tool_call_id",
            },
            fields(messages=[*HELLO, {"role": "assistant", "content": "Hello"}]): {},
            fields(
                messages=[*HELLO, {"role": "assistant", "content": "Hello"}],
                continue_final_message=True,
                add_generation_prompt=False,
            ): {"choices.0.message.content": str},
            fields(continue_final_message=True, add_generation_prompt=True): {"status": 400},
            '{"max_completion_tokens": 3, "max_tokens": null}': {"usage.completion_tokens": 3},
            '{"max_completion_tokens": 3}': {"status": 400, "error.message": contains("max_completion_tokens")},
            '{"logprobs": true}': {
                "choices.0.logprobs.content.#": 4,
                "choices.0.logprobs.content.0": has("token", "logprob", "bytes", "top_logprobs"),
                "choices.0.logprobs.content.0.top_logprobs": [],
            },
            '{"logprobs": true, "top_logprobs": 2}': {
                "choices.0.logprobs.content.*.top_logprobs.#": all_are(2),
                "choices.0.logprobs.content.0.top_logprobs.0": has("token", "logprob", "bytes"),
                "choices.0.logprobs.content.*.logprob": all_are(float),
            },
            '{"top_logprobs": 2}': {"status": 400, "error.param": "top_logprobs"},
            '{"top_logprobs": 0}': {"choices.0.logprobs": NONE},
            '{"logprobs": true, "top_logprobs": 21}': refused("invalid_value", "top_logprobs"),
            '{"store": true}': refused("not_implemented", "store"),
            '{"service_tier": "flex"}': refused("invalid_value", "service_tier"),
            '{"metadata": 5}': refused("invalid_type", "metadata"),
            '{"chat_template": "{{ messages }}"}': {"status": 400, "error.param": "chat_template"},
            '{"documents": [{"text": "a"}]}': refused("not_implemented", "documents"),
            '{"include_reasoning": false}': {},
            '{"reasoning_effort": 5}': refused("invalid_type", "reasoning_effort"),
            '{"parallel_tool_calls": "x"}': refused("invalid_type", "parallel_tool_calls"),
            '{"tools": "a"}': refused("invalid_type", "tools"),
            '{"tools": [5]}': refused("invalid_type", "tools[0]"),
            fields(tools=[{"type": "function", "function": {"name": "a b"}}]): {
                **refused("invalid_value", "tools[0].function.name"),
                "error.message": contains("it must match the pattern"),
            },
            fields(messages=[*HELLO, {"role": "assistant"}]): {"status": 400, "error.param": "messages[1].content"},
            fields(messages=[{**HELLO[0], "foo": 1}]): refused("unknown_field", "messages[0].foo"),
            fields(messages=[{"role": "user", "content": "a " * 9000}]): {
                **refused("context_length_exceeded", "messages"),
            },
            '{"logprobs": true, "top_logprobs": -1}': {"status": 400, "error.param": "top_logprobs"},
            '{"logprobs": 2}': refused("invalid_type", "logprobs"),
            '{"response_format": {"type": "text"}}': {"choices.0.message.content": "{hello}"},
            '{"response_format": {"type": "json_object"}, "max_tokens": 40}': {
                "choices.0.message.content": starts("{")
            },
            fields(
                response_format={
                    "type": "json_schema",
                    "json_schema": {
                        "name": "a",
                        "schema": {
                            "type": "object",
                            "properties": {"a": {"enum": [7]}},
                            "required": ["a"],
                            "additionalProperties": False,
                        },
                    },
                },
                max_tokens=40,
            ): {"choices.0.message.content": named('{"a": 7}', lambda text: json.loads(text) == {"a": 7})},
            '{"response_format": {"type": "yaml"}}': {"status": 400, "error.param": starts("response_format")},
            '{"response_format": {"type": "json_schema"}}': {"status": 400, "error.param": starts("response_format")},
            fields(tools=[TOOL], tool_choice="none"): {"choices.0.message.content": str},
            fields(tools=[TOOL]): {"choices.0.message.role": "assistant"},
            fields(tools=[TOOL], tool_choice="required", max_tokens=60): {
                "choices.0.finish_reason": "tool_calls",
                "choices.0.message.content": NONE,
                "choices.0.message.tool_calls.0": has("id", "type", "function"),
                "choices.0.message.tool_calls.0.id": starts("call_"),
                "choices.0.message.tool_calls.0.type": "function",
                "choices.0.message.tool_calls.0.function.name": "weather",
                "choices.0.message.tool_calls.0.function.arguments": named(
                    "JSON", lambda text: json.loads(text) == {"day": "now"}
                ),
            },
            fields(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=60): {
                "choices.0.message.tool_calls.#": 1,
                "choices.0.finish_reason": named("stop or tool_calls", ("stop", "tool_calls").__contains__),
            },
            fields(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "nope"}}): {
                "status": 400,
                "error.param": "tool_choice",
            },
            fields(tools=[TOOL], tool_choice="maybe"): {"status": 400, "error.param": "tool_choice"},
            fields(tool_choice="required"): {"status": 400, "error.param": "tool_choice"},
            fields(tool_choice="auto"): {},
            fields(tools=[]): {},
            fields(tools=[TOOL, TOOL]): {"status": 400, "error.param": starts("tools[1]")},
            fields(tools=[{"type": "function"}]): {"status": 400, "error.param": starts("tools[0]")},
            fields(tools=[{"type": "web_search"}]): {"status": 400, "error.param": starts("tools[0]")},
            fields(functions=[TOOL["function"]]): {"status": 400, "error.param": "functions"},
            fields(parallel_tool_calls=False): {},
            fields(modalities=["text"]): {},
            fields(modalities=["text", "audio"]): {"status": 400, "error.param": "modalities"},
            fields(audio={"voice": "a", "format": "wav"}): {"status": 400, "error.param": "audio"},
            fields(prediction={"type": "content", "content": "a"}): {"status": 400, "error.param": "prediction"},
            fields(web_search_options={}): {},
            fields(web_search_options={"a": 1}): {"status": 400, "error.param": "web_search_options"},
            fields(store=False, metadata={"a": "b"}, service_tier="auto"): {},
            fields(reasoning_effort="low"): {},
            fields(chat_template_kwargs={"enable_thinking": False}): {},
            fields(chat_template_kwargs=5): {"status": 400, "error.param": "chat_template_kwargs"},
            fields(verbosity="medium"): {},
            fields(verbosity="high"): {"status": 400, "error.param": "verbosity"},
            fields(thinking_token_budget=1): {},
            fields(
                messages=[*HELLO, {"role": "assistant", "content": "<think>"}],
                continue_final_message=True,
                add_generation_prompt=False,
                thinking_token_budget=3,
                max_tokens=12,
            ): {
                "choices.0.message.reasoning_content": str,
                "choices.0.message.content": str,
                # with the markers, of which `</think>` has several tokens
                "usage.completion_tokens_details.reasoning_tokens": named("4 to 9", range(4, 10).__contains__),
            },
            fields(thinking_token_budget=-1): {"status": 400, "error.param": "thinking_token_budget"},
        },
    ),
]
CHAT_STREAMS = list(
    variants(
        "/v1/chat/completions",
        {**ASK, "stream": True},
        {
            "{}": {
                "header:content-type": starts("text/event-stream"),
                "done": True,
                "events.*.object": all_are("chat.completion.chunk"),
                "events.*.id": named("one id", lambda ids: len(set(ids)) == 1),
                "events.0.model": "{model}",
                "events.0.choices.0.delta.role": "assistant",
                "events.0.choices.0.finish_reason": NONE,
                "events.-1.choices.0.finish_reason": "length",
                "events": named(
                    "the text of the whole answer",
                    lambda all_of: len("".join(e["choices"][0]["delta"].get("content") or "" for e in all_of)) > 0,
                ),
            },
            '{"stream_options": {"include_usage": true}}': {
                "events.-1.choices": [],
                "events.-1.usage.completion_tokens": 4,
                "events.0.usage": NONE,
            },
            '{"n": 2}': {
                "events": named("both choices", lambda all_of: {e["choices"][0]["index"] for e in all_of} == {0, 1})
            },
            '{"logprobs": true, "top_logprobs": 1}': {
                "events": named(
                    "four tokens",
                    lambda all_of: (
                        sum(len((e["choices"][0].get("logprobs") or {}).get("content") or []) for e in all_of) == 4
                    ),
                )
            },
            fields(tools=[TOOL], tool_choice="required", max_tokens=60): {
                "events.-1.choices.0.finish_reason": "tool_calls",
                "events": named(
                    "arguments in parts",
                    lambda all_of: (
                        json.loads(
                            "".join(
                                call["function"].get("arguments") or ""
                                for e in all_of
                                for call in e["choices"][0]["delta"].get("tool_calls") or []
                            )
                        )
                        == {"day": "now"}
                    ),
                ),
            },
            '{"messages": []}': refused("invalid_value", "messages"),
        },
    )
)

# ---- Responses

GREETING = {"input": "Say hello.", "max_output_tokens": 4, "temperature": 0}
RESPONSES = [
    Call(
        "/v1/responses",
        {**GREETING, "instructions": "Be brief.", "metadata": {"a": "b"}},
        {
            "object": "response",
            "id": starts("resp_"),
            "created_at": int,
            "model": "{model}",
            "$.status": "incomplete",
            "incomplete_details.reason": "max_output_tokens",
            "error": NONE,
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "output.0.type": "message",
            "output.0.role": "assistant",
            "output.0.id": starts("msg_"),
            "output.0.content.0.type": "output_text",
            "output.0.content.0.text": str,
            "output.0.content.0.annotations": [],
            "usage.output_tokens": 4,
            "usage.input_tokens_details.cached_tokens": int,
            "usage.output_tokens_details.reasoning_tokens": 0,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "store": True,
            "previous_response_id": NONE,
        },
        save={"response": "id"},
    ),
    Call("GET /v1/responses/{response}", None, {"id": "{response}", "object": "response"}),
    Call("GET /v1/responses/{response}/input_items", None, {"object": "list", "data.0.role": "user"}),
    Call("POST /v1/responses/{response}/cancel", None, {"status": 400, **OPENAI_ERROR}),
    Call("/v1/responses", {**GREETING, "previous_response_id": "{response}"}, {"previous_response_id": "{response}"}),
    Call("DELETE /v1/responses/{response}", None, {"id": "{response}", "deleted": True}),
    Call("GET /v1/responses/{response}", None, {"status": 404, **OPENAI_ERROR}),
    Call("/v1/responses", {**GREETING, "previous_response_id": "{response}"}, {"status": 404, **OPENAI_ERROR}),
    Call("/v1/responses", {**GREETING, "store": False}, {"store": False}, save={"unstored": "id"}),
    Call("GET /v1/responses/{unstored}", None, {"status": 404}),
    Call(
        "/v1/responses/input_tokens",
        {"input": "Say hello."},
        {"object": "response.input_tokens", "input_tokens": POSITIVE},
    ),
    *(Call("/v1/responses", body, must) for body, must in BODY_ERRORS.items()),
    *variants(
        "/v1/responses",
        GREETING,
        {
            '{"input": null}': {"status": 400, "error.param": "input"},
            '{"input": []}': {"output.0.type": "message"},
            fields(input=[{"role": "user", "content": "Say hello."}]): {"output.0.type": "message"},
            fields(input=[{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]): {},
            fields(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]): {"status": 400},
            fields(input=[{"type": "nonsense"}]): {"status": 400, "error.param": starts("input[0]")},
            '{"background": true}': {"status": 400, "error.param": "background"},
            '{"temperature": 9000}': refused("invalid_value", "temperature"),
            '{"max_output_tokens": 0}': refused("invalid_value", "max_output_tokens"),
            '{"max_tokens": 5}': {"status": 400, "error.message": contains("max_output_tokens")},
            '{"nonsense": 1}': refused("unknown_field", "nonsense"),
            '{"truncation": "auto"}': {"truncation": "auto"},
            '{"truncation": "never"}': {"status": 400, "error.param": "truncation"},
            '{"include": ["message.output_text.logprobs"], "top_logprobs": 1}': {"output.0.content.0.logprobs.#": 4},
            '{"include": ["nonsense"]}': {"status": 400, "error.param": starts("include")},
            '{"text": {"format": {"type": "json_object"}}, "max_output_tokens": 40}': {
                "output.0.content.0.text": starts("{")
            },
            '{"reasoning": {"effort": "low"}}': {"reasoning.effort": "low"},
            '{"model": "gpt-9"}': refused("model_not_found", "model", 404),
            '{"conversation": "conv_1"}': {"status": 400, "error.param": "conversation"},
            '{"prompt": {"id": "p"}}': {"status": 400, "error.param": "prompt"},
            fields(tools=[{"type": "function", **TOOL["function"]}], tool_choice="required", max_output_tokens=60): {
                "output.0.type": "function_call",
                "output.0.name": "weather",
                "output.0.call_id": str,
                "output.0.arguments": named("JSON", lambda text: json.loads(text) == {"day": "now"}),
                "$.status": "completed",
            },
            fields(tools=[{"type": "file_search"}]): refused("not_implemented", "tools[0].type"),
            fields(tools=[{"type": "web_search"}]): {"output.0.type": "message"},  # Codex always sends it
            '{"top_logprobs": 3}': refused("invalid_value", "top_logprobs"),
            '{"n": 2}': refused("not_implemented", "n"),
            '{"metadata": {"a": 5}}': refused("invalid_type", "metadata.a"),
            '{"instructions": 5}': refused("invalid_type", "instructions"),
            '{"previous_response_id": "resp_nowhere"}': {
                **refused("previous_response_not_found", status=404),
                "error.param": "previous_response_id",
            },
            '{"reasoning": {"budget": 3}}': refused("unknown_field", "reasoning.budget"),
            '{"stream": true}': {
                "header:content-type": starts("text/event-stream"),
                "names": [
                    "response.created",
                    "response.in_progress",
                    "response.output_item.added",
                    "response.content_part.added",
                    *["response.output_text.delta"] * 4,
                    "response.output_text.done",
                    "response.content_part.done",
                    "response.output_item.done",
                    "response.incomplete",
                ],
                "events.*.sequence_number": list(range(12)),
                "events.0.response.status": "in_progress",
                "events.-1.response.usage.output_tokens": 4,
            },
        },
    ),
]

# ---- Messages

TURN = {"model": "default", "max_tokens": 4, "messages": HELLO, "temperature": 0}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
MESSAGES = [
    Call(
        "/v1/messages",
        TURN,
        {
            "": has("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"),
            "id": starts("msg_"),
            "type": "message",
            "role": "assistant",
            "content.0.type": "text",
            "content.0.text": str,
            "stop_reason": "max_tokens",
            "stop_sequence": NONE,
            "usage.input_tokens": int,
            "usage.output_tokens": 4,
            "usage.cache_read_input_tokens": int,
            "usage.cache_creation_input_tokens": 0,
            "header:request-id": starts("req_"),
        },
        headers={"anthropic-version": "2023-06-01", "x-api-key": "any"},
    ),
    Call("/v1/messages", "{", {"status": 400, **ANTHROPIC_ERROR, "error.type": "invalid_request_error"}),
    Call("/v1/messages", "[]", {"status": 400, **ANTHROPIC_ERROR}),
    Call("GET /v1/messages", None, {"status": 405, **ANTHROPIC_ERROR, "header:allow": "POST"}),
    Call("/v1/messages/nowhere", {}, rejected("/v1/messages/nowhere", "not_found_error", 404)),
    Call(
        "/v1/messages/count_tokens",
        {"model": "default", "messages": HELLO},
        {"": has("input_tokens"), "input_tokens": POSITIVE},
    ),
    Call("/v1/messages/count_tokens", {"model": "default"}, rejected("messages")),
    *variants(
        "/v1/messages",
        TURN,
        {
            '{"max_tokens": null}': rejected("max_tokens"),
            '{"max_tokens": 0}': rejected("max_tokens"),
            '{"max_tokens": 1000000}': {},
            '{"messages": []}': rejected("messages"),
            '{"model": null}': rejected("model"),
            '{"model": "claude-9"}': rejected("claude-9", "not_found_error", 404),
            '{"temperature": -1}': rejected("temperature"),
            '{"temperature": "a"}': rejected("temperature"),
            '{"top_k": 5, "top_p": 0.9}': {},
            '{"nonsense": 1}': rejected("nonsense"),
            '{"n": 2}': rejected("n "),
            '{"system": "Be brief."}': {"content.#": 1},
            '{"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}': {"content.#": 1},
            '{"system": 5}': rejected("system"),
            '{"stop_sequences": [" "]}': {"stop_reason": "stop_sequence", "stop_sequence": " "},
            '{"stop_sequences": [""]}': rejected("stop_sequences"),
            '{"top_p": 0}': rejected("top_p"),
            '{"stream": "x"}': rejected("stream"),
            '{"tool_choice": {"type": "any"}}': rejected("tool_choice"),
            '{"tools": [{"name": "f"}]}': rejected("tools[0].input_schema"),
            '{"thinking": {}}': rejected("thinking.type"),
            '{"output_config": {"effort": "x"}}': rejected("output_config.effort"),
            fields(messages=[{"role": "user", "content": "a " * 9000}]): rejected("context"),
            '{"metadata": {"user_id": "u"}, "service_tier": "auto"}': {},
            '{"thinking": {"type": "disabled"}}': {},
            '{"thinking": {"type": "enabled", "budget_tokens": 1024}}': {},
            fields(
                messages=[*HELLO, {"role": "assistant", "content": "<think>"}],
                thinking={"type": "enabled", "budget_tokens": 3},
                max_tokens=12,
            ): {"content.*.type": ["thinking", "text"], "content.0.signature": str},
            '{"thinking": {"type": "enabled", "budget_tokens": 0}}': rejected("thinking.budget_tokens"),
            '{"thinking": {"type": "sometimes"}}': rejected("thinking.type"),
            '{"thinking_token_budget": 5}': rejected("thinking_token_budget"),
            '{"mcp_servers": [{"type": "url"}]}': rejected("mcp_servers"),
            '{"container": "c"}': rejected("container"),
            fields(messages=[{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]): {},
            fields(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]): rejected("image"),
            fields(messages=[{"role": "robot", "content": "a"}]): rejected("messages[0].role"),
            fields(messages=[{"role": "user"}]): rejected("messages[0].content"),
            fields(messages=[*HELLO, {"role": "assistant", "content": "Hello"}]): {},
            fields(tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=60): {
                "stop_reason": "tool_use",
                "content.0.type": "tool_use",
                "content.0.name": "weather",
                "content.0.input": {"day": "now"},
                "content.0.id": str,
            },
            fields(tools=[ANTHROPIC_TOOL], tool_choice={"type": "tool", "name": "nope"}): rejected("nope"),
            fields(tools=[{"type": "web_search_20250305", "name": "web_search"}]): rejected("tools[0]"),
            fields(tools=[{"name": "a b", "input_schema": {}}]): rejected("tools[0].name"),
            '{"stream": true}': {
                "header:content-type": starts("text/event-stream"),
                "header:request-id": starts("req_"),
                "names": [
                    "message_start",
                    "content_block_start",
                    "ping",
                    *["content_block_delta"] * 4,
                    "content_block_stop",
                    "message_delta",
                    "message_stop",
                ],
                "done": False,
                "events.0.message.stop_reason": NONE,
                "events.0.message.content": [],
                "events.3.delta.type": "text_delta",
                "events.-2.delta.stop_reason": "max_tokens",
                "events.-2.usage.output_tokens": 4,
            },
        },
    ),
]

# ---- native endpoints, models, tokens, operation

OTHERS = [
    Call(
        "GET /v1/models",
        None,
        {
            "object": "list",
            "data.#": 1,
            "data.0.id": "{model}",
            "data.0.object": "model",
            "data.0.owned_by": str,
            "data.0.created": int,
            "data.0.max_model_len": POSITIVE,
        },
    ),
    Call("GET /v1/models/{model}", None, {"id": "{model}", "object": "model"}),
    Call("GET /v1/models/gpt-9", None, refused("model_not_found", status=404)),
    Call("DELETE /v1/models/{model}", None, {"status": 405, **OPENAI_ERROR}),
    Call("GET /nowhere", None, refused("unknown_path", status=404)),
    Call("GET /health", None, {"": has("status")}),
    Call("GET /ping", None, {}),
    Call("GET /version", None, {"version": str}),
    Call("GET /health_generate", None, {}),
    Call("GET /get_model_info", None, {"model_path": str}),
    Call("GET /get_server_info", None, {"": dict}),
    Call("GET /get_load", None, {}),
    Call("GET /load", None, {"server_load": int}),
    Call("GET /openapi.json", None, {"openapi": starts("3."), "paths": dict}),
    Call("GET /metrics", None, {"": contains("# TYPE"), "header:content-type": starts("text/plain")}),
    Call("POST /flush_cache", None, {}),
    Call("/tokenize", {"prompt": "a b"}, {"tokens": [81, 278], "count": 2, "max_model_len": POSITIVE}),
    Call("/tokenize", {"messages": HELLO}, {"count": POSITIVE, "tokens": all_are(int)}),
    Call("/tokenize", {"prompt": "a b", "return_token_strs": True}, {"token_strs.#": 2}),
    Call("/tokenize", {}, {"status": 400, **OPENAI_ERROR}),
    Call("/tokenize", {"prompt": 5}, {"status": 400, "error.param": "prompt"}),
    Call("/detokenize", {"tokens": [81, 278]}, {"text": "a b"}),
    Call("/detokenize", {"tokens": [-1]}, {"status": 400, "error.param": starts("tokens")}),
    Call("/detokenize", {"tokens": "a"}, {"status": 400, "error.param": "tokens"}),
    Call("/abort_request", {"rid": "nobody"}, refused("request_not_found", "rid", 404)),
    Call("GET /v1/embeddings", None, {"status": 405, **OPENAI_ERROR}),
    *variants(
        "/generate",
        {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 4, "temperature": 0}},
        {
            "{}": {
                "text": "{story}",
                "output_ids.#": 4,
                "meta_info.finish_reason": {"type": "length", "length": 4},
                "meta_info.prompt_tokens": 4,
                "meta_info.completion_tokens": 4,
                "meta_info.id": str,
            },
            '{"text": ["a", "b"]}': {"#": 2, "*.meta_info.completion_tokens": [4, 4]},
            '{"text": null, "input_ids": [81, 278]}': {"meta_info.prompt_tokens": 2},
            '{"input_ids": [81]}': {"status": 400},
            '{"text": null}': {"status": 400, **OPENAI_ERROR},
            '{"rid": "mine"}': {"meta_info.id": "mine"},
            '{"return_logprob": true, "top_logprobs_num": 2}': {
                "meta_info.output_token_logprobs.#": 4,
                "meta_info.output_top_logprobs.*.#": all_are(2),
            },
            '{"sampling_params": {"nonsense": 1}}': {"status": 400, "error.param": "sampling_params.nonsense"},
            '{"sampling_params": {"temperature": -1}}': {"status": 400, "error.param": "sampling_params.temperature"},
            '{"sampling_params": {"max_new_tokens": 4, "stop": [" "], "temperature": 0}}': {
                "meta_info.finish_reason.type": "stop",
                "meta_info.finish_reason.matched": " ",
            },
            '{"image_data": "a"}': {"status": 400, "error.param": "image_data"},
            '{"nonsense": 1}': refused("unknown_field", "nonsense"),
            '{"stream": true}': {"done": True, "events.-1.meta_info.completion_tokens": 4, "events.-1.text": "{story}"},
        },
    ),
]

LINE = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": STORY}
FILES = [
    Call(
        "/v1/files",
        form={"purpose": "batch", "file": json.dumps(LINE)},
        must={
            "object": "file",
            "id": starts("file-"),
            "purpose": "batch",
            "filename": "lines.jsonl",
            "bytes": POSITIVE,
            "created_at": int,
        },
        save={"file": "id"},
    ),
    Call("/v1/files", form={"purpose": "party", "file": "a"}, must={"status": 400, "error.param": "purpose"}),
    Call("/v1/files", {"purpose": "batch"}, {"status": 400, **OPENAI_ERROR}),
    Call("GET /v1/files", None, {"object": "list", "data.0.id": "{file}", "has_more": False}),
    Call("GET /v1/files/{file}", None, {"id": "{file}", "object": "file"}),
    Call("GET /v1/files/{file}/content", None, {"custom_id": "one"}),
    Call("GET /v1/files/file-nowhere", None, {"status": 404, **OPENAI_ERROR}),
    Call("/v1/batches", {"input_file_id": "{file}"}, {"status": 400, "error.message": contains("endpoint")}),
    Call(
        "/v1/batches",
        {"input_file_id": "file-nowhere", "endpoint": "/v1/completions", "completion_window": "24h"},
        {"status": 404, **OPENAI_ERROR},
    ),
    Call(
        "/v1/batches",
        {"input_file_id": "{file}", "endpoint": "/nowhere", "completion_window": "24h"},
        {"status": 400, "error.param": "endpoint"},
    ),
    Call(
        "/v1/batches",
        {"input_file_id": "{file}", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}},
        {
            "object": "batch",
            "id": starts("batch_"),
            "input_file_id": "{file}",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
            "request_counts": has("total", "completed", "failed"),
        },
        save={"batch": "id"},
    ),
    Call("GET /v1/batches/{batch}", None, {"id": "{batch}", "object": "batch"}),
    Call("GET /v1/batches", None, {"object": "list", "data.0.id": "{batch}"}),
    Call("GET /v1/batches/batch_nowhere", None, {"status": 404, **OPENAI_ERROR}),
    Call("/v1/files", form={"purpose": "batch", "file": "{}"}, save={"other": "id"}),
    Call("DELETE /v1/files/{other}", None, {"id": "{other}", "deleted": True, "object": "file"}),
    Call("GET /v1/files/{other}", None, {"status": 404, **OPENAI_ERROR}),
    Call("DELETE /v1/files/{other}", None, {"status": 404, **OPENAI_ERROR}),
]

# ---- embeddings and scores

POOLED = [
    *variants(
        "/v1/embeddings",
        {"input": "a b"},
        {
            "{}": {
                "": has("object", "data", "model", "usage", "id"),
                "object": "list",
                "data.0.object": "embedding",
                "data.0.index": 0,
                "data.0.embedding": all_are(float),
                "usage.prompt_tokens": POSITIVE,
                "usage.total_tokens": POSITIVE,
                "model": "{model}",
            },
            '{"input": ["a", "b"]}': {"data.*.index": [0, 1]},
            '{"input": [1, 2, 3]}': {"data.#": 1, "usage.prompt_tokens": 3},
            '{"input": [[1], [2, 3]]}': {"data.#": 2, "usage.prompt_tokens": 3},
            '{"encoding_format": "base64"}': {"data.0.embedding": str},
            '{"encoding_format": "float"}': {"data.0.embedding": list},
            '{"encoding_format": "hex"}': {"status": 400, "error.param": "encoding_format"},
            '{"dimensions": 1000000}': {"status": 400, "error.param": "dimensions"},
            '{"input": []}': {"status": 400, "error.param": "input"},
            '{"input": ""}': {"status": 400, "error.param": "input"},
            '{"input": null}': {"status": 400, "error.param": "input"},
            '{"input": {"a": 1}}': {"status": 400, "error.param": starts("input")},
            '{"user": "u"}': {},
            '{"model": "gpt-9"}': refused("model_not_found", "model", 404),
            '{"nonsense": 1}': refused("unknown_field", "nonsense"),
        },
    ),
    *variants(
        "/score",
        {"text_1": "a", "text_2": ["b", "c"]},
        {
            "{}": {
                "object": "list",
                "data.*.index": [0, 1],
                "data.*.score": all_are(NUMBER),
                "usage.total_tokens": POSITIVE,
            },
            '{"text_2": "b"}': {"data.#": 1},
            '{"text_1": ["a", "b"]}': {"data.#": 2},
            '{"text_1": ["a", "b", "c"]}': {"status": 400, **OPENAI_ERROR},
            '{"text_1": null}': {"status": 400, **OPENAI_ERROR},
        },
    ),
    *variants(
        "/v1/rerank",
        {"query": "a", "documents": ["b", "c", "d"]},
        {
            "{}": {
                "results.#": 3,
                "results.*.relevance_score": named("falling", lambda value: value == sorted(value, reverse=True)),
                "results.*.index": named("0, 1, 2 in some order", lambda value: sorted(value) == [0, 1, 2]),
            },
            '{"top_n": 1}': {"results.#": 1},
            '{"top_n": -1}': {"status": 400, "error.param": "top_n"},
            '{"documents": []}': {"status": 400, "error.param": "documents"},
            '{"query": null}': {"status": 400, "error.param": "query"},
            '{"return_documents": true}': {"results.0.document": dict},
        },
    ),
]

TABLES: dict[str, Sequence[Call]] = {
    "completions": [*COMPLETIONS, *COMPLETION_STREAMS],
    "chat": [*CHAT, *CHAT_STREAMS],
    "responses": RESPONSES,
    "messages": MESSAGES,
    "others": [COMPLETIONS[0], *OTHERS],
    "files": FILES,
    "pooled": POOLED,
}


def check(server: Server, calls: Sequence[Call]) -> None:
    with server.client() as http:
        caller = Caller(http, model=http.get("/v1/models").json()["data"][0]["id"])
        faults = [
            f"{call.request} {json.dumps(call.body or call.form)[:300]}: {fault}"
            for call in calls
            for fault in caller.faults(call)
        ]
    assert not faults, f"{len(faults)} of {assertions(calls)} do not hold:\n" + "\n".join(faults)


@pytest.mark.parametrize("name", TABLES)
def test_what_clients_rely_on(name: str, server: Server) -> None:
    check(server, TABLES[name])
