"""Tool calls and reasoning in chat completions: what clients send and get, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from every import every
from server_support import MODEL, Serving, listening, serving
from transcripts import SCHEMA, TRANSCRIPTS, Transcript

from srv.errors import RequestError
from srv.reply.formats import ReplyFormat, choose
from srv.reply.output import MAX_NAME
from srv.reply.rows import Marks, ReasoningFormat, ToolFormat
from srv.server.settings import GrammarSettings
from srv.testing.fake_engine import EOS, ByteTokenizer, FakeEngine
from srv.types import RequestSpec, ThinkingBudget, Vocabulary

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Weather?"}]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "get-time_2.x", "parameters": None}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}"
QWEN = choose("qwen", "qwen3", [])
LONG = {"context_length": 4096, "max_request_tokens": 4096}


class Template(ByteTokenizer):
    """Keeps what chat templates are given; the prompt ends with `end`."""

    def __init__(self, end: str = "") -> None:
        super().__init__()
        self.end = end
        self.messages: list[dict[str, Any]] = []
        self.variables: dict[str, Any] = {}

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool = True, variables: Any = None) -> str:
        self.messages, self.variables = messages, dict(variables)
        return "prompt " + self.end


@asynccontextmanager
async def replying(
    *reply: str | int, text: ByteTokenizer | None = None, found: ReplyFormat = QWEN, step: int = 1, end: bool = True
) -> AsyncGenerator[Serving, None]:
    """A server whose model writes this text, or these tokens."""
    tokens = [token for part in reply for token in (part.encode() if isinstance(part, str) else [part])]
    engine = FakeEngine(script=lambda message: [*tokens, EOS] if end else tokens, tokens_per_step=step)
    async with serving(engine, text, reply_format=found, **LONG) as server:
        yield server


def deltas_of(events: list[Any]) -> list[dict[str, Any]]:
    return [choice["delta"] for event in events if event != "[DONE]" for choice in event["choices"]]


def collected(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from the deltas of a stream."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"name": part["function"]["name"], "arguments": "", "id": part["id"]})
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    return message


async def test_a_message_has_text_reasoning_and_calls() -> None:
    async with replying(THOUGHT, CALL) as server:
        (choice,) = (await server.post(CHAT, messages=HELLO, tools=TOOLS)).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == ("I look.", "Where?")
        assert message["reasoning"] == "Where?", "vLLM's newer name"
        assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "weather", "arguments": '{"city": "Paris"}'}
        ] * 2
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        alone = (await server.post(CHAT, messages=HELLO)).json()["choices"][0]
        assert alone["message"]["content"] == f"I look.\n{CALL}{CALL}", "without tools a call is text"
        assert alone["finish_reason"] == "stop"
        assert "tool_calls" not in alone["message"]


async def test_content_is_null_where_there_is_none() -> None:
    async with replying(CALL) as server:
        message = (await server.post(CHAT, messages=HELLO, tools=TOOLS)).json()["choices"][0]["message"]
        assert message["content"] is None
    async with replying("<think>never", end=False) as server:
        choice = (await server.post(CHAT, messages=HELLO)).json()["choices"][0]
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "never")
        assert choice["finish_reason"] == "length"
    async with replying() as server:
        assert (await server.post(CHAT, messages=HELLO)).json()["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_stream_says_the_same(step: int) -> None:
    """The first delta of a call has its id and name, later ones only more arguments; no other delta has a call."""
    async with replying(THOUGHT, CALL, step=step) as server:
        events = await server.stream(CHAT, messages=HELLO, tools=TOOLS)
        deltas = deltas_of(events)
        message = collected(deltas)
        assert (message["content"], message["reasoning_content"]) == ("I look.", "Where?")
        assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == [
            ("weather", '{"city": "Paris"}')
        ] * 2
        assert deltas[0] == {"role": "assistant", "content": ""}
        parts = [part for delta in deltas if "tool_calls" in delta for part in delta["tool_calls"]]
        assert all(delta["tool_calls"] for delta in deltas if "tool_calls" in delta), "an empty array"
        firsts = [part for part in parts if "id" in part]
        assert [(part["index"], part["type"], part["function"]["arguments"]) for part in firsts] == [
            (0, "function", ""),
            (1, "function", ""),
        ]
        assert all(part.keys() == {"index", "function"} for part in parts if part not in firsts)
        assert all(part["function"].keys() == {"arguments"} for part in parts if part not in firsts)
        assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)
        reasons = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["tool_calls"]


@every("transcript", [transcript for transcript in TRANSCRIPTS if transcript.tools != "llama4_pythonic"])
async def test_both_forms_of_a_response_agree_in_all_formats(transcript: Transcript) -> None:
    chosen = choose(transcript.tools, transcript.thinks, [])
    async with replying(transcript.reply, found=chosen, step=3, text=Template(transcript.prompt)) as server:
        whole = (await server.post(CHAT, messages=HELLO, tools=TOOLS)).json()["choices"][0]
        stream = collected(deltas_of(await server.stream(CHAT, messages=HELLO, tools=TOOLS)))
    for message in (whole["message"], stream):
        calls = [call.get("function", call) for call in message.get("tool_calls", ())]
        said = tuple((call["name"], json.loads(call["arguments"])) for call in calls)
        assert said == transcript.calls
        assert (message["content"] or "", message.get("reasoning_content", "")) == (
            transcript.text,
            transcript.reasoning,
        )
    assert whole["finish_reason"] == ("tool_calls" if transcript.calls else "stop")


async def test_tools_and_results_reach_the_template() -> None:
    template = Template()
    conversation = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Where?",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
                {"id": "b", "type": "function", "index": 1, "function": {"name": "now", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Sun"}]},
        {"role": "tool", "tool_call_id": "b", "content": "Noon", "name": "clock"},
    ]
    async with replying("x", text=template) as server:
        assert (await server.post(CHAT, messages=conversation, tools=TOOLS)).status_code == 200
        assert [message["role"] for message in template.messages] == ["user", "assistant", "tool", "tool"]
        assistant, first, second = template.messages[1:]
        assert assistant["content"] == ""
        assert assistant["reasoning_content"] == "Where?"
        assert [call["function"] for call in assistant["tool_calls"]] == [
            {"name": "weather", "arguments": {"city": "Paris"}},
            {"name": "now", "arguments": {}},
        ]
        assert (first["tool_call_id"], first["name"], first["content"]) == ("a", "weather", "Sun")
        assert (second["name"], second["content"]) == ("clock", "Noon")
        assert template.variables["tools"] == [
            TOOLS[0],
            {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
            {
                "type": "function",
                "function": {"name": "get-time_2.x", "parameters": {"type": "object", "properties": {}}},
            },
        ]
        await server.post(CHAT, messages=HELLO, tools=TOOLS, tool_choice="none")
        assert "tools" not in template.variables
        old = [*HELLO, {"role": "assistant", "content": "y", "reasoning": "Hm"}]
        await server.post(CHAT, messages=[*old, *HELLO])
        assert template.messages[1]["reasoning_content"] == "Hm"


async def test_the_end_of_the_prompt_decides_where_the_reply_starts() -> None:
    for end, reasoning, content in (("<think>\n", "a", "b"), ("<think>\n\n</think>\n\n", None, "a</think>b")):
        async with replying("a</think>b", text=Template(end)) as server:
            message = (await server.post(CHAT, messages=HELLO)).json()["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


async def test_the_client_may_have_reasoning_as_text_or_in_one_piece() -> None:
    async with replying("<think>a b</think>c") as server:
        message = (await server.post(CHAT, messages=HELLO, separate_reasoning=False)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "<think>a b</think>c", "refusal": None}
        pieces = deltas_of(await server.stream(CHAT, messages=HELLO))
        assert len([delta for delta in pieces if "reasoning_content" in delta]) > 1
        whole = deltas_of(await server.stream(CHAT, messages=HELLO, stream_reasoning=False))
        assert [delta for delta in whole if "reasoning_content" in delta] == [
            {"reasoning_content": "a b", "reasoning": "a b"}
        ]


@pytest.mark.parametrize("ids", ["functions.{name}:{index}", "{name}" * 3 + "{index}"])
async def test_the_id_of_a_call_with_a_long_name_is_taken_back(ids: str) -> None:
    """By each API, with as long a name as it allows."""
    name, schema = "f" * MAX_NAME, {"type": "object"}
    row = choose("kimi_k2", None, []).tools
    assert row is not None
    row = row._replace(ids=ids)
    reply = f"<|tool_calls_section_begin|><|tool_call_begin|>{name}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    async with replying(reply, found=ReplyFormat(tools=row)) as server:

        async def post(path: str, **body: Any) -> Any:
            response = await server.post(path, **body)
            assert response.status_code == 200, response.text
            return response.json()

        tools = [{"type": "function", "function": {"name": name}}]
        message = (await post(CHAT, messages=HELLO, tools=tools))["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
        await post(CHAT, messages=[*HELLO, message, result], tools=tools)

        flat = [{"type": "function", "name": name}]
        response = await post("/v1/responses", input="a", tools=flat)
        (call,) = response["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
        await post("/v1/responses", input=[*HELLO, call, result], tools=flat)
        await post("/v1/responses", input=[result], tools=flat, previous_response_id=response["id"])

        ours = {"tools": [{"name": name, "input_schema": schema}], "max_tokens": 2000, "model": MODEL}
        content = (await post("/v1/messages", messages=HELLO, **ours))["content"]
        (call,) = content
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "1"}
        told = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        await post("/v1/messages", messages=told, **ours)


@pytest.mark.parametrize("step", [1, 4, 100])
async def test_usage_counts_the_tokens_of_reasoning(step: int) -> None:
    """One token per byte: the markers, and what is between them."""
    reply = "<think>a b</think>cd"
    expected = {"completion_tokens": len(reply) + 1, "reasoning": len("<think>a b</think>")}
    async with replying(reply, step=step) as server:
        whole = (await server.post(CHAT, messages=HELLO)).json()["usage"]
        events = await server.stream(CHAT, messages=HELLO, stream_options={"include_usage": True})
        for usage in (whole, events[-2]["usage"]):
            assert usage["completion_tokens"] == expected["completion_tokens"]
            assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - expected["reasoning"]) <= (step > 99)
    async with replying("text", found=ReplyFormat()) as server:
        assert "completion_tokens_details" not in (await server.post(CHAT, messages=HELLO)).json()["usage"]


async def test_one_call_at_most_without_parallel_calls() -> None:
    async with replying(CALL, CALL) as server:
        message = (await server.post(CHAT, messages=HELLO, tools=TOOLS, parallel_tool_calls=False)).json()
        assert len(message["choices"][0]["message"]["tool_calls"]) == 1
        deltas = deltas_of(await server.stream(CHAT, messages=HELLO, tools=TOOLS, parallel_tool_calls=False))
        assert len(collected(deltas)["tool_calls"]) == 1


async def test_markers_that_are_special_tokens_are_found() -> None:
    """Special tokens are left out of the text, but for the markers of the format."""
    row = ToolFormat("special", call=Marks(("<258>",), ("<259>",)))
    call = (258, '{"name": "now", "arguments": {}}', 259)
    async with replying("a", *call, 256, "b", found=ReplyFormat(tools=row)) as server:
        message = (await server.post(CHAT, messages=HELLO, tools=TOOLS)).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert message["content"] == "ab"
        alone = (await server.post(CHAT, messages=HELLO)).json()["choices"][0]["message"]
        assert alone["content"] == 'a{"name": "now", "arguments": {}}b'


async def test_each_output_and_its_logprobs_and_tokens_are_complete() -> None:
    async with replying(THOUGHT) as server:
        body = {"messages": HELLO, "tools": TOOLS, "n": 2, "logprobs": True, "return_token_ids": True}
        events = await server.stream(CHAT, **body)
        choices = [choice for event in events[:-1] for choice in event["choices"]]
        whole = (await server.post(CHAT, **body)).json()["choices"]
        for index in (0, 1):
            own_choices = [choice for choice in choices if choice["index"] == index]
            assert collected([choice["delta"] for choice in own_choices])["tool_calls"][0]["name"] == "weather"
            tokens = [token for choice in own_choices for token in choice.get("token_ids", ())]
            scored = [one for choice in own_choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
            assert tokens == whole[index]["token_ids"]
            assert scored == whole[index]["logprobs"]["content"]
            assert len(tokens) == len(scored)


async def test_a_conversation_is_tokenized_with_its_tools() -> None:
    template = Template()
    async with replying("x", text=template) as server:
        body = {"messages": HELLO, "tools": TOOLS}
        assert (await server.post(CHAT, **body)).status_code == 200
        shown = template.variables["tools"]
        assert [tool["function"]["name"] for tool in shown] == ["weather", "now", "get-time_2.x"]
        template.variables = {}
        assert (await server.post("/tokenize", **body)).status_code == 200
        assert template.variables["tools"] == shown


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_the_prompt_describes_the_allowed_tools_alone() -> None:
    template = Template()
    async with replying(CALL, text=template) as server:
        choice = allowed("auto", "now", "weather")
        assert (await server.post(CHAT, messages=HELLO, tools=TOOLS, tool_choice=choice)).status_code == 200
        assert [tool["function"]["name"] for tool in template.variables["tools"]] == ["weather", "now"]


@every(
    ("change", "param", "part"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", 'must be "function"'),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type", '"function"'),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "it must match the pattern",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
            "one of them",
        ),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "now", "no")}, "tool_choice", "allow some of them"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "now")}, "tool_choice", "must have the form"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice", "must have the form"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must have the form"),
        ({"tools": [*TOOLS, TOOLS[1]]}, "tools[3].function.name", "the same name"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "send a text"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
            "messages[0].tool_call_id",
            "only tool has it",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]},
            "tools[0].function.parameters",
            "tools[0].function.parameters.type is refused: it is none of object, array,",
        ),
    ],
)
async def test_what_is_wrong_is_named(change: dict[str, Any], param: str, part: str) -> None:
    async with replying("x") as server:
        response = await server.post(CHAT, **{"messages": HELLO, **change})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param, error
        assert part in error["message"]


class Iterating(Template):
    """Refuses arguments that are no object, like templates that iterate over them."""

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool = True, variables: Any = None) -> str:
        for message in messages:
            for call in message.get("tool_calls", ()):
                if isinstance(call["function"]["arguments"], str):
                    raise RequestError("no items()", code="chat_template_error")
        return super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt, variables=variables)


@every(
    ("arguments", "value"),
    [
        ('{"cmd": "ls', '{"cmd": "ls'),
        ('{"cmd": "ls",}', '{"cmd": "ls",}'),
        ("[]", "[]"),
        ("null", {}),
        ("", {}),
        (None, {}),
        ('{"a": 1}', {"a": 1}),
    ],
)
async def test_any_arguments_are_taken_back(arguments: str | None, value: object) -> None:
    """Templates get an object or the text, and those that iterate over arguments an object."""
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "go on"}]
    for template, expected in ((Template(), value), (Iterating(), value if isinstance(value, dict) else {})):
        async with replying("x", text=template) as server:
            response = await server.post(CHAT, messages=messages)
            assert response.status_code == 200, response.text
            assert template.messages[1]["tool_calls"][0]["function"]["arguments"] == expected


async def test_the_openai_client_runs_a_tool_loop() -> None:
    """Over a real socket: the client's own types accept the calls, and their messages are accepted back."""
    replies = iter([THOUGHT, "Sunny.", THOUGHT, "Sunny."])
    engine = FakeEngine(script=lambda message: [*next(replies).encode(), EOS])
    async with (
        listening(engine, reply_format=QWEN, **LONG) as server,
        openai.AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        create: Any = client.chat.completions.create
        first = await create(model="tiny", messages=HELLO, tools=TOOLS)
        message = first.choices[0].message
        assert message.tool_calls[0].function.name == "weather"
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sun"}
        history = [*HELLO, message.model_dump(exclude_none=True), result]
        second = await create(model="tiny", messages=history, tools=TOOLS)
        assert second.choices[0].message.content == "Sunny."
        assert second.choices[0].finish_reason == "stop"
        stream_of: Any = client.chat.completions.stream
        async with stream_of(model="tiny", messages=HELLO, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        message = final.choices[0].message
        assert message.tool_calls[0].function.arguments == '{"city": "Paris"}'
        result["tool_call_id"] = message.tool_calls[0].id
        # What the client parsed is in the message that it sends back.
        sent = {**message.model_dump(), "parsed": {"city": "Paris"}}
        assert "parsed_arguments" in sent["tool_calls"][0]["function"]
        third = await create(model="tiny", messages=[*HELLO, sent, result], tools=TOOLS)
        assert third.choices[0].message.content == "Sunny."


async def test_a_message_that_has_only_reasoning_is_accepted_back() -> None:
    template = Template()
    async with replying("<think>never", end=False, text=template) as server:
        message = (await server.post(CHAT, messages=HELLO)).json()["choices"][0]["message"]
        assert message["content"] is None
        assert (await server.post(CHAT, messages=[*HELLO, message, *HELLO])).status_code == 200
        assert (template.messages[1]["content"], template.messages[1]["reasoning_content"]) == ("", "never")
        refused = await server.post(CHAT, messages=[{"role": "user", "content": "x", "reasoning": "y"}])
        assert refused.json()["error"]["param"] == "messages[0].reasoning"


async def test_the_effort_of_reasoning_reaches_the_template() -> None:
    template = Template()
    async with replying("x", text=template) as server:
        for fields, effort in (
            ({"reasoning_effort": "none"}, "none"),
            ({"reasoning_effort": "low"}, "low"),
            ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
            ({"reasoning_effort": None}, None),
        ):
            assert (await server.post(CHAT, messages=HELLO, **fields)).status_code == 200
            assert template.variables.get("reasoning_effort") == effort


GRAMMARS = GrammarSettings("llguidance", vocab_size=ByteTokenizer.vocab_size, end_tokens=(EOS,))
ONE_BYTE = ReplyFormat(
    choose("qwen", "none", []).tools, ReasoningFormat("x", (), Marks(("<",), (">", "!!")), ends_before=("<tool_call>",))
)


@every(
    ("end", "fields", "inside", "ends"),
    [
        ("<", {}, True, (">", "!!")),
        ("", {"tools": TOOLS}, False, (">", "!!", "<tool_call>")),
    ],
)
async def test_a_budget_of_reasoning_arrives_at_the_engine(
    end: str, fields: dict[str, Any], inside: bool, ends: tuple[str, ...]
) -> None:
    async with serving(None, Template(end), reply_format=ONE_BYTE, grammars=GRAMMARS, **LONG) as server:
        body = {"messages": HELLO, "max_tokens": 2, **fields}
        assert (await server.post(CHAT, **body, thinking_token_budget=5)).status_code == 200
        assert (await server.post(CHAT, **body, thinking_token_budget=None)).status_code == 200
        budget = ThinkingBudget(tokens=5, end=(62,), begins=("<",), ends=ends, inside=inside)
        (vocabulary, *requests) = server.engine.received
        assert isinstance(vocabulary, Vocabulary), "the engine looks for the markers in the bytes of tokens"
        assert [spec.params.thinking for spec in requests] == [budget, None]


HARMONY = choose("gpt-oss", None, [])


@every(
    ("reply_format", "end", "begins", "inside"),
    [
        (QWEN, "</think>", ("<think>",), True),
        (HARMONY, "<|end|>", ("<|channel|>analysis<|message|>",), False),
    ],
)
async def test_a_budget_of_anthropics_messages_is_the_same(
    reply_format: ReplyFormat, end: str, begins: tuple[str, ...], inside: bool
) -> None:
    async with serving(None, Template("<think>"), reply_format=reply_format, grammars=GRAMMARS, **LONG) as server:
        body = {"messages": HELLO, "max_tokens": 2, "model": "tiny"}
        limited = {"thinking": {"type": "enabled", "budget_tokens": 5}}
        assert (await server.post("/v1/messages", **body, **limited)).status_code == 200
        assert (await server.post(CHAT, **body, thinking_token_budget=5)).status_code == 200
        first, second = (
            message.params.thinking for message in server.engine.received if isinstance(message, RequestSpec)
        )
        assert first == second
        assert (first.tokens, first.end, first.begins, first.inside) == (5, tuple(end.encode()), begins, inside)
        refused = await server.post("/v1/messages", **body, **limited, allowed_token_ids=[5])
        assert "thinking.budget_tokens is refused" in refused.json()["error"]["message"]
    async with serving(None, Template(), reply_format=ReplyFormat(), grammars=GRAMMARS, **LONG) as server:
        assert (await server.post("/v1/messages", **body, **limited)).status_code == 200  # it has no reasoning
        assert [message.params.thinking for message in server.engine.received] == [None]


class WithoutBytes(Template):
    def vocabulary(self) -> None:  # type: ignore[override]
        return None


async def test_a_budget_needs_the_bytes_of_tokens() -> None:
    async with serving(None, WithoutBytes("<think>"), reply_format=QWEN, grammars=GRAMMARS, **LONG) as server:
        error = (await server.post(CHAT, messages=HELLO, thinking_token_budget=5)).json()["error"]
        assert (error["code"], error["param"]) == ("not_implemented", "thinking_token_budget")
        assert "no bytes of their own" in error["message"]


@every("path", ["/v1/completions", "/generate", "/v1/responses", "/v1/messages"])
async def test_endpoints_without_a_budget_refuse_its_name(path: str) -> None:
    async with serving() as server:
        error = (await server.post(path, thinking_token_budget=5)).json()["error"]
        assert "unknown field thinking_token_budget" in error["message"]


@every(
    ("reply_format", "changes", "fields", "code", "part"),
    [
        (ONE_BYTE, {}, {}, "no_grammars", "start it with a grammar backend"),
        (ReplyFormat(), {"grammars": GRAMMARS}, {}, "not_implemented", "--reasoning-parser NAME"),
        (ONE_BYTE, {"grammars": GRAMMARS}, {"allowed_token_ids": [5]}, "not_implemented", "lacks the token 62"),
        (
            ONE_BYTE,
            {"grammars": GRAMMARS},
            {"thinking_token_budget": -1},
            "invalid_value",
            "greater than or",
        ),
    ],
)
async def test_a_budget_that_cannot_be_kept_is_refused(
    reply_format: ReplyFormat, changes: dict[str, Any], fields: dict[str, Any], code: str, part: str
) -> None:
    async with serving(None, Template("<think>"), reply_format=reply_format, **changes, **LONG) as server:
        response = await server.post(CHAT, **{"messages": HELLO, "thinking_token_budget": 5, **fields})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (code, "thinking_token_budget")
        assert part in error["message"]
