"""Reasoning, tool calls and their results in Anthropic's Messages and OpenAI's Responses, over the fake engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import openai
import pytest
from every import every
from server_support import MODEL, listening, serving

from srv.reply.formats import ReplyFormat, choose
from srv.testing.fake_engine import EOS, ByteTokenizer, FakeEngine

pytestmark = pytest.mark.anyio
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>\nhm\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
REPLY = f"{THOUGHT}I look. {CALLS}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
ANTHROPIC_TOOLS = [
    {"name": "look", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "stop", "input_schema": {"type": "object", "propertyNames": {"pattern": "a"}}, "defer_loading": True},
]
FUNCTIONS = [
    {"type": "function", "name": "look", "description": "d", "parameters": SCHEMA},
    {"type": "function", "name": "stop", "parameters": None},
]
TEXT_PART = {"type": "input_text", "text": "x"}
CUSTOM = {"type": "custom", "name": "patch", "description": "p", "format": {"type": "grammar", "syntax": "lark"}}


def format_of(tools: str = "hermes", reasoning: str = "qwen3") -> ReplyFormat:
    return choose(tools, reasoning, ())


LONG = {"reply_format": format_of(), "context_length": 2048, "max_request_tokens": 2048}


def generating(text: str, tokens_per_step: int = 1) -> FakeEngine:
    return FakeEngine(script=lambda message: [*text.encode(), EOS], tokens_per_step=tokens_per_step)


class Recording(ByteTokenizer):
    """Keeps what its template was given last."""

    messages: list[dict[str, object]]
    variables: Mapping[str, object]

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        self.messages, self.variables = messages, variables
        return super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt)


def payloads(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content of a message from its events, as a client builds it."""
    blocks: list[dict[str, Any]] = []
    open_index, partial = None, ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                assert event["index"] == len(blocks)
                open_index, partial = event["index"], ""
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == open_index
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    partial += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    blocks[-1][name] += delta[name]
            case "content_block_stop":
                assert event["index"] == open_index
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(partial or "{}")
                open_index = None
    return blocks


@every("tokens_per_step", [1, 7, 500])
async def test_blocks_of_anthropics_messages(tokens_per_step: int) -> None:
    body = {"model": MODEL, "max_tokens": 230, "messages": HELLO, "tools": ANTHROPIC_TOOLS}
    async with serving(generating(REPLY, tokens_per_step), **LONG) as server:
        whole = (await server.post(MESSAGES, **body)).json()
        thinking, text, look, stop = whole["content"]
        assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
        assert thinking["signature"]
        assert (text["type"], text["text"].strip()) == ("text", "I look.")
        assert (look["type"], look["name"], look["input"]) == ("tool_use", "look", {"city": "Rome", "days": 2})
        assert (stop["name"], stop["input"]) == ("stop", {})
        assert look["id"] != stop["id"]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
        events = payloads((await server.http.post(MESSAGES, json={**body, "stream": True})).text)
        streamed = rebuilt(events)
        for block in (*streamed, *whole["content"]):
            block.pop("id", None)
            block.pop("signature", None)
        assert streamed == whole["content"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert [start.get("input") for start in starts] == [None, None, {}, {}]
        assert [event["type"] for event in events].count("ping") == 1


@every("limit", [30, REPLY.index('"city') + 4, REPLY.index(', "days'), REPLY.index("}}") + 1, len(REPLY) - 30])
async def test_a_reply_that_the_limit_cuts_is_taken_back(limit: int) -> None:
    """A call whose arguments were cut is incomplete in Responses, and no block of Anthropic's whole message."""
    with_object = [name for name, end in (("look", "}}"), ("stop", "{}}")) if limit > REPLY.index(end)]
    begun = [
        name for name in ("look", "stop") if limit > REPLY.index("{", REPLY.index('"arguments"', REPLY.index(name)))
    ]
    async with serving(generating(REPLY), **LONG) as server:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": limit, "messages": HELLO, "tools": ANTHROPIC_TOOLS}
        message = (await server.post(MESSAGES, **body)).json()
        assert message["stop_reason"] == "max_tokens"
        assert [block["name"] for block in message["content"] if block["type"] == "tool_use"] == with_object
        history = [*HELLO, {"role": "assistant", "content": message["content"]}, *HELLO]
        assert (await server.post(MESSAGES, **{**body, "messages": history, "max_tokens": 1})).status_code == 200

        response = (await server.post(RESPONSES, input="hi", tools=FUNCTIONS, max_output_tokens=limit)).json()
        assert response["status"] == "incomplete"
        calls = [(item["name"], item["status"]) for item in response["output"] if item["type"] == "function_call"]
        assert calls == [(name, "completed" if name in with_object else "incomplete") for name in begun]
        history = [*HELLO, *response["output"], *HELLO]
        again = await server.post(RESPONSES, input=history, tools=FUNCTIONS, max_output_tokens=1)
        assert again.status_code == 200, again.text

        chat = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "look"}}], "max_tokens": limit}
        said = (await server.post("/v1/chat/completions", **chat)).json()["choices"][0]["message"]
        history = [*HELLO, said, *HELLO]
        again = await server.post("/v1/chat/completions", **{**chat, "messages": history, "max_tokens": 1})
        assert again.status_code == 200, again.text


@every("tokens_per_step", [1, 500])
async def test_a_stop_string_within_a_call_cuts_it(tokens_per_step: int) -> None:
    async with serving(generating(REPLY, tokens_per_step), **LONG) as server:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 230, "messages": HELLO, "tools": ANTHROPIC_TOOLS}
        message = (await server.post(MESSAGES, **body, stop_sequences=[', "days'])).json()
        assert [block["type"] for block in message["content"]] == ["thinking", "text"]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ', "days')
        chat = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "look"}}], "max_tokens": 230}
        cut = (await server.post("/v1/chat/completions", **chat, stop=[', "days'])).json()["choices"][0]
        assert (cut["finish_reason"], cut["message"]["tool_calls"][0]["function"]["arguments"]) == (
            "stop",
            '{"city": "Rome"',
        )
        whole = (await server.post("/v1/chat/completions", **chat, stop=["</tool_call>"])).json()["choices"][0]
        assert (whole["finish_reason"], len(whole["message"]["tool_calls"])) == ("tool_calls", 1)


async def test_arguments_that_are_no_object_are_not_run_empty() -> None:
    """A model wrote a comma too many; the good call beside it is a call."""
    reply = CALLS.replace("2}}", "2,}}")
    async with serving(generating(reply), **LONG) as server:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 230, "messages": HELLO, "tools": ANTHROPIC_TOOLS}
        message = (await server.post(MESSAGES, **body)).json()
        text, stop = message["content"]
        assert (text["type"], text["text"].rstrip("}\n")) == ("text", '{"city": "Rome", "days": 2,')
        assert (stop["name"], message["stop_reason"]) == ("stop", "tool_use")
        body["tools"] = ANTHROPIC_TOOLS[:1]
        message = (await server.post(MESSAGES, **body, stop_sequences=["</tool_call>"])).json()
        assert [block["type"] for block in message["content"]] == ["text"]


@every("tokens_per_step", [1, 500])
async def test_text_around_calls_is_blocks_or_lines(tokens_per_step: int) -> None:
    reply = "Before.\n" + CALLS.partition("\n<tool_call>")[0] + "\nAfter."
    async with serving(generating(reply, tokens_per_step), **LONG) as server:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": HELLO, "tools": ANTHROPIC_TOOLS}
        blocks = (await server.post(MESSAGES, **body)).json()["content"]
        assert [block.get("text") for block in blocks] == ["Before.", None, "After."]
        items = (await server.post(RESPONSES, input="hi", tools=FUNCTIONS)).json()["output"]
        texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
        assert texts == ["Before.", "After."]
        tools = [{"type": "function", "function": {"name": "look"}}]
        chat = (await server.post("/v1/chat/completions", messages=HELLO, tools=tools)).json()
        assert chat["choices"][0]["message"]["content"] == "Before.\nAfter."


async def test_the_history_of_anthropics_calls_and_results() -> None:
    messages = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Rom"}},
                {"type": "tool_use", "id": "t2", "name": "stop", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "failed", "is_error": True},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    text = Recording()
    async with serving(generating("ok"), text, reply_format=format_of()) as server:
        body = {"model": MODEL, "max_tokens": 9, "messages": messages, "tools": ANTHROPIC_TOOLS}
        assert (await server.post(MESSAGES, **body, thinking={"type": "disabled"})).status_code == 200
        _, assistant, first, second, user = text.messages
        assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
        calls: Any = assistant["tool_calls"]
        assert [call["function"] for call in calls] == [
            {"name": "look", "arguments": {"city": "Rom"}},
            {"name": "stop", "arguments": {}},
        ]
        assert (first["role"], first["content"], first["tool_call_id"], first["name"]) == ("tool", "sun", "t1", "look")
        assert (second["content"], second["tool_call_id"]) == ("failed", "t2")
        assert user == {"role": "user", "content": "and now?"}
        tools: Any = text.variables["tools"]
        assert [tool["function"]["name"] for tool in tools] == ["look", "stop"]
        assert tools[1]["function"]["parameters"]["propertyNames"] == {"pattern": "a"}
        assert text.variables["enable_thinking"] is False


@every(
    ("fields", "part"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool that Anthropic defines"),
        ({"tools": [{"type": "bash_20250124", "name": "shell"}]}, "a tool of the type bash_20250124 is called bash"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {"a": 1}}]},
            "unknown field tools[0].input_schema",
        ),
        ({"tool_choice": {"type": "any"}}, 'tool_choice.type = "any" is refused'),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, 'tool_choice.name is "g"'),
    ],
)
async def test_bad_tools_are_named(fields: dict[str, Any], part: str) -> None:
    async with serving(reply_format=format_of()) as server:
        refused = await server.post(MESSAGES, model=MODEL, max_tokens=9, messages=HELLO, **fields)
        assert refused.status_code == 400
        assert part in refused.json()["error"]["message"]


async def test_tools_that_clients_run_are_offered_with_the_schemas_of_anthropic() -> None:
    """A reply calls one of them by its fixed name; the body has no schema."""
    text = Recording()
    call = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    names = {
        "bash_20250124": "bash",
        "text_editor_20250728": "str_replace_based_edit_tool",
        "memory_20250818": "memory",
    }
    tools = [{"type": kind, "name": name, "cache_control": {"type": "ephemeral"}} for kind, name in names.items()]
    tools[1]["max_characters"] = 100
    async with serving(generating(call), text, reply_format=format_of()) as server:
        answer = (await server.post(MESSAGES, model=MODEL, max_tokens=200, messages=HELLO, tools=tools)).json()
        assert answer["content"][-1]["name"] == "bash"
        assert answer["content"][-1]["input"] == {"command": "ls"}
        offered: Any = [tool["function"] for tool in text.variables["tools"]]
        assert [tool["name"] for tool in offered] == list(names.values())
        assert sorted(offered[0]["parameters"]["properties"]) == ["command", "restart"]
        assert offered[1]["parameters"]["properties"]["command"]["enum"] == ["view", "create", "str_replace", "insert"]
        assert {"path", "insert_line", "insert_text", "view_range"} < set(offered[1]["parameters"]["properties"])
        assert {"old_path", "new_path"} < set(offered[2]["parameters"]["properties"])


async def test_a_thread_is_refused_so_that_the_sdk_sends_the_whole_conversation() -> None:
    async with serving() as server:
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            body = {"model": MODEL, "max_tokens": 9, "messages": HELLO, "thread": thread}
            refused = await server.post(MESSAGES, **body)
            assert refused.status_code == 400
            assert refused.json()["error"]["type"] == "invalid_request_error"
            assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
        assert (await server.post(MESSAGES, **{**body, "thread": None})).status_code == 200


async def test_tools_without_a_known_format_are_refused() -> None:
    async with serving() as server:
        anthropic = await server.post(MESSAGES, model=MODEL, max_tokens=9, messages=HELLO, tools=ANTHROPIC_TOOLS)
        assert "--tool-call-parser" in anthropic.json()["error"]["message"]
        responses = await server.post(RESPONSES, input="hi", tools=FUNCTIONS)
        assert responses.json()["error"]["code"] == "no_tool_format"


@every("tokens_per_step", [1, 7, 500])
async def test_items_of_openais_responses(tokens_per_step: int) -> None:
    async with serving(generating(REPLY, tokens_per_step), **LONG) as server:
        body = {"input": "hi", "tools": FUNCTIONS, "include": ["reasoning.encrypted_content"]}
        events = payloads((await server.http.post(RESPONSES, json={**body, "stream": True})).text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        response = events[-1]["response"]
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert response["output"] == items
        reasoning, message, look, stop = items
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert message["content"][0]["text"].strip() == "I look."
        assert (look["type"], look["name"], json.loads(look["arguments"])) == (
            "function_call",
            "look",
            {"city": "Rome", "days": 2},
        )
        assert (stop["name"], json.loads(stop["arguments"]), stop["status"]) == ("stop", {}, "completed")
        assert [item["id"].split("_")[0] for item in items] == ["rs", "msg", "fc", "fc"]
        kinds = [event["type"].removeprefix("response.") for event in events]
        kinds = [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
        call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        assert kinds == [
            *("created", "in_progress"),
            *("output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done"),
            *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
            *("content_part.done", "output_item.done", *call, *call, "completed"),
        ]
        for index, item in enumerate(items):
            of_item = [event for event in events if event.get("output_index") == index]
            assert {event["item_id"] for event in of_item if "item_id" in event} == {item["id"]}
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
        assert response["tools"] == FUNCTIONS
        whole = (await server.post(RESPONSES, **body)).json()
        assert [item["type"] for item in whole["output"]] == [item["type"] for item in items]


async def test_a_conversation_with_calls_and_reasoning_goes_on() -> None:
    """Stored, and stateless with the reasoning that the response encoded."""
    text = Recording()
    async with serving(generating(REPLY), text, **LONG) as server:
        body = {"tools": FUNCTIONS, "include": ["reasoning.encrypted_content"]}
        first = (await server.post(RESPONSES, input="hi", **body)).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "sun"},
            {
                "type": "function_call_output",
                "call_id": calls[1]["call_id"],
                "output": [{"type": "input_text", "text": "x"}],
            },
        ]
        await server.post(RESPONSES, input=outputs, previous_response_id=first["id"], **body)
        stored = text.messages
        assert [message["role"] for message in stored] == ["user", "assistant", "tool", "tool"]
        assert stored[1]["reasoning_content"] == "hm"
        assert [message.get("name") for message in stored[2:]] == ["look", "stop"]
        bare = [{**item, "content": None} if item["type"] == "reasoning" else item for item in first["output"]]
        stateless = [{"role": "user", "content": "hi"}, *bare, *outputs]
        assert (await server.post(RESPONSES, input=stateless, **body, store=False)).status_code == 200
        assert text.messages == stored


async def test_custom_tools_are_functions_with_a_text() -> None:
    reply = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n"}}\n</tool_call>'
    text = Recording()
    async with serving(generating(reply), text, **LONG) as server:
        body = {"input": "hi", "tools": [CUSTOM], "stream": True}
        events = payloads((await server.http.post(RESPONSES, json=body)).text)
        kinds = [event["type"].removeprefix("response.") for event in events[2:-1]]
        assert kinds == [
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
        ]
        (item,) = events[-1]["response"]["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "*** Begin\n")
        tools: Any = text.variables["tools"]
        assert '"syntax": "lark"' in tools[0]["function"]["description"]
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
        items = [{"role": "user", "content": "hi"}, item, output]
        assert (await server.post(RESPONSES, input=items, tools=[CUSTOM])).status_code == 200
        assert text.messages[2]["content"] == "done"


async def test_allowed_tools_are_the_ones_that_the_prompt_describes() -> None:
    text = Recording()
    async with serving(generating("ok"), text, reply_format=format_of()) as server:
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "stop"}]}
        assert (await server.post(RESPONSES, input="hi", tools=FUNCTIONS, tool_choice=allowed)).status_code == 200
        tools: Any = text.variables["tools"]
        assert [tool["function"]["name"] for tool in tools] == ["stop"]
        await server.post(RESPONSES, input="hi", tools=FUNCTIONS, tool_choice="none")
        assert "tools" not in text.variables


async def test_the_openai_client_reads_calls_and_reasoning() -> None:
    """The real client, which checks and collects the events."""
    async with listening(generating(REPLY), **LONG) as server:
        client = openai.AsyncOpenAI(
            base_url=f"{str(server.http.base_url).rstrip('/')}/v1", api_key="any", max_retries=0
        )
        async with client.responses.stream(model=MODEL, input="hi", tools=FUNCTIONS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[-1] == "response.completed"
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
        assert final.output_text.strip() == "I look."
        # Its objects are accepted back with what the client parsed.
        sent = [item.model_dump() for item in final.output]
        sent[2]["parsed_arguments"] = {"city": "Rome"}  # of strict tools, the client fills it itself
        again = await client.responses.create(model=MODEL, input=[*HELLO, *sent], tools=FUNCTIONS)
        assert again.output
        await client.close()


@every(("written", "read"), [("a\nb\tc", "a\nb\tc"), ("\\ud83d", "?")])
async def test_arguments_that_the_parser_accepts_are_read(written: str, read: str) -> None:
    """Control characters in strings, as models write them, and half of a surrogate pair."""
    look = f'<tool_call>\n{{"name": "look", "arguments": {{"city": "{written}"}}}}\n</tool_call>'
    async with serving(generating(look), **LONG) as server:
        body = {"model": MODEL, "max_tokens": 200, "messages": HELLO, "tools": ANTHROPIC_TOOLS}
        (block,) = (await server.post(MESSAGES, **body)).json()["content"]
        assert block["input"] == {"city": read}
        (call,) = (await server.post(RESPONSES, input="hi", tools=FUNCTIONS)).json()["output"]
        again = [{"role": "user", "content": "hi"}, call]
        assert (await server.post(RESPONSES, input=again, tools=FUNCTIONS)).status_code == 200
    patch = look.replace("look", "patch").replace("city", "input")
    async with serving(generating(patch), **LONG) as server:
        (item,) = (await server.post(RESPONSES, input="hi", tools=[CUSTOM])).json()["output"]
        assert item["input"] == read


async def test_a_reply_that_the_client_began_is_no_reasoning() -> None:
    """Of a model that always thinks first, unless the client has begun its answer."""
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    always = {**LONG, "reply_format": format_of(reasoning="deepseek-r1")}
    async with serving(generating(" five"), **always) as server:
        body = {"model": MODEL, "max_tokens": 50}
        for messages, kind in ((HELLO, "thinking"), (begun, "text")):
            (block,) = (await server.post(MESSAGES, **body, messages=messages)).json()["content"]
            assert block["type"] == kind
        chat = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
        (choice,) = (await server.post("/v1/chat/completions", **chat)).json()["choices"]
        assert choice["message"]["content"] == " five"


async def test_log_probabilities_cover_white_space_between_words() -> None:
    """It is held back until the next word shows that no marker follows."""
    async with serving(generating(f"{THOUGHT}a b\n\nc"), **LONG) as server:
        body = {"input": "hi", "include": ["message.output_text.logprobs"]}
        _, message = (await server.post(RESPONSES, **body)).json()["output"]
        (part,) = message["content"]
        assert part["text"] == "a b\n\nc"
        assert "".join(entry["token"] for entry in part["logprobs"]).startswith("a b\n\nc")


@every(
    ("path", "fields"),
    [
        (
            MESSAGES,
            {"model": MODEL, "max_tokens": 9, "messages": HELLO, "tools": [{"name": 'a"b', "input_schema": {}}]},
        ),
        (RESPONSES, {"input": "hi", "tools": [{"type": "function", "name": 'a"b'}]}),
        (RESPONSES, {"input": "hi", "tools": [{"type": "custom", "name": "a\nb"}]}),
    ],
)
async def test_names_that_a_call_cannot_have_are_refused(path: str, fields: dict[str, Any]) -> None:
    async with serving(reply_format=format_of()) as server:
        refused = await server.post(path, **fields)
        assert refused.status_code == 400
        assert "tools[0].name" in refused.json()["error"]["message"]


async def test_the_same_name_twice_is_refused_where_it_is() -> None:
    async with serving(reply_format=format_of()) as server:
        left_out = {"type": "web_search"}
        refused = await server.post(RESPONSES, input="hi", tools=[left_out, *FUNCTIONS, FUNCTIONS[0]])
        assert refused.json()["error"]["param"] == "tools[3].name"
        tools = [*ANTHROPIC_TOOLS, ANTHROPIC_TOOLS[1]]
        refused = await server.post(MESSAGES, model=MODEL, max_tokens=9, messages=HELLO, tools=tools)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("tools[2].name = stop is refused")
