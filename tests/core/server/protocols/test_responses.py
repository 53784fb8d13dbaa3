"""`/v1/responses` over the fake engine: the response, the order of events, the store, and what Codex sends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from every import every
from server_support import MODEL, Serving, eventually, generating, prompt, serving

from srv.reply.formats import choose
from srv.server.protocols.responses.store import ResponseStore, StoredResponse
from srv.testing.fake_engine import EOS, FakeEngine

pytestmark = pytest.mark.anyio
RESPONSES = "/v1/responses"


async def streamed(server: Serving, **body: Any) -> list[dict[str, Any]]:
    response = await server.http.post(RESPONSES, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = []
    for block in filter(None, response.text.split("\n\n")):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_response_has_openais_form() -> None:
    engine = generating("Hello!", EOS)
    engine.cached_tokens = 2
    async with serving(engine) as server:
        response = (await server.post(RESPONSES, model=MODEL, input="hi", metadata={"a": "b"}, temperature=0)).json()
        assert response["id"].startswith("resp_")
        assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
        assert (response["metadata"], response["temperature"], response["store"]) == ({"a": "b"}, 0, True)
        (item,) = response["output"]
        assert item.pop("id").startswith("msg_")
        assert item == {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}],
        }
        read = len("user: hi\nassistant: ")
        assert response["usage"] == {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + 7,
        }


async def test_a_stream_has_the_events_of_a_response_in_their_order() -> None:
    async with serving(generating("Hey", EOS)) as server:
        events = await streamed(server, input="hi")
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * 3,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        created, added, item_done, completed = events[0], events[2], events[-2], events[-1]
        assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
        assert created["response"]["usage"] is None
        assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
        assert completed["response"]["output"] == [item_done["item"]]
        assert {event["item_id"] for event in events if "item_id" in event} == {item_done["item"]["id"]}
        assert "".join(event["delta"] for event in events if "delta" in event) == "Hey"
        assert events[-4]["text"] == "Hey"


@every("stream", [False, True])
async def test_a_response_that_is_cut_is_incomplete(stream: bool) -> None:
    async with serving() as server:
        body = {"input": "hi", "max_output_tokens": 3}
        if stream:
            *_, last = await streamed(server, **body)
            assert last["type"] == "response.incomplete"
            response = last["response"]
        else:
            response = (await server.post(RESPONSES, **body)).json()
        assert (response["status"], response["max_output_tokens"]) == ("incomplete", 3)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"


async def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "dev"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
        {"role": "system", "content": "later"},
        {"role": "user", "content": "d"},
    ]
    async with serving() as server:
        await server.post(RESPONSES, input=items, instructions="first", max_output_tokens=1)
        assert prompt(server) == ("system: first\ndev\nuser: a\nb\nassistant: c\nsystem: later\nuser: d\nassistant: ")


async def test_log_probabilities_are_included_if_asked_for() -> None:
    async with serving(generating("ab", EOS)) as server:
        body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = (await server.post(RESPONSES, **body)).json()["output"][0]["content"][0]["logprobs"]
        assert [entry["token"] for entry in whole] == ["a", "b"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
        events = await streamed(server, **body)
        assert [entry for event in events if "delta" in event for entry in event["logprobs"]] == whole


async def test_a_stored_response_can_be_continued_read_and_deleted() -> None:
    async with serving(generating("one", EOS)) as server:
        first = (await server.post(RESPONSES, input="a", instructions="I")).json()
        second = (await server.post(RESPONSES, input="b", previous_response_id=first["id"])).json()
        assert prompt(server) == "user: a\nassistant: one\nuser: b\nassistant: "  # without the earlier instructions
        assert second["previous_response_id"] == first["id"]
        *_, last = await streamed(server, input="c", previous_response_id=second["id"])
        assert prompt(server).count("assistant: one") == 2
        path = f"{RESPONSES}/{last['response']['id']}"
        assert (await server.http.get(path)).json() == last["response"]
        items = (await server.http.get(f"{path}/input_items")).json()
        assert [item["content"][0]["text"] for item in items["data"]] == ["a", "one", "b", "one", "c"]
        assert (items["first_id"], items["has_more"]) == (items["data"][0]["id"], False)
        again = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "d"}]
        await server.post(RESPONSES, input=again)
        assert prompt(server) == "assistant: one\nuser: d\nassistant: "
        assert (await server.http.post(f"{path}/cancel")).status_code == 400
        assert (await server.http.delete(path)).json()["deleted"] is True
        for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            missing = await server.http.request(method, path + end)
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "response_not_found")


async def test_what_is_not_stored_cannot_be_continued() -> None:
    async with serving() as server:
        other = {"Authorization": "Bearer other"}
        kept = (await server.post(RESPONSES, input="a", max_output_tokens=1)).json()["id"]
        dropped = (await server.post(RESPONSES, input="a", max_output_tokens=1, store=False)).json()["id"]
        for name, headers in ((dropped, {}), ("resp_x", {}), (kept, other)):
            body = {"input": "b", "previous_response_id": name}
            response = await server.http.post(RESPONSES, json=body, headers=headers)
            assert (response.status_code, response.json()["error"]["param"]) == (404, "previous_response_id")
        assert (await server.http.get(f"{RESPONSES}/{kept}", headers=other)).status_code == 404
        assert (await server.http.get(f"{RESPONSES}/{kept}")).status_code == 200


async def test_the_length_of_a_prompt_is_what_a_response_then_uses() -> None:
    async with serving() as server:
        first = (await server.post(RESPONSES, input="a", max_output_tokens=2)).json()
        for body in ({"input": "abc", "instructions": "i"}, {"input": "b", "previous_response_id": first["id"]}):
            counted = (await server.post(f"{RESPONSES}/input_tokens", **body)).json()
            used = (await server.post(RESPONSES, **body, max_output_tokens=2)).json()["usage"]["input_tokens"]
            assert counted == {"object": "response.input_tokens", "input_tokens": used}
        refused = await server.post(f"{RESPONSES}/input_tokens", input=3)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


def test_the_store_is_bounded_and_drops_the_least_recently_used() -> None:
    def stored(name: str, text: str = "") -> StoredResponse:
        return StoredResponse({"id": name, "output": [{"id": f"m{name}", "text": text}]}, [])

    store = ResponseStore(max_responses=2, max_bytes=400)
    store.put("o", stored("1"))
    store.put("o", stored("2"))
    assert store.get("o", "1")
    store.put("o", stored("3"))
    assert store.get("o", "2") is None
    assert store.item("o", "m1") == {"id": "m1", "text": ""}
    assert store.item("p", "m1") is None
    store.put("o", stored("4", "x" * 500))
    assert store.get("o", "4") is None
    store.put("o", stored("5", "x" * 330))
    assert len(store) == 1
    assert store.item("o", "m1") is None
    assert store.delete("o", "5")
    assert not store.delete("o", "5")
    assert store.bytes == 0


async def test_what_codex_sends() -> None:
    """The form of its requests: tools that OpenAI runs are left out, and the response lists those that are known."""
    function = {
        "type": "function",
        "name": "shell",
        "description": "d",
        "parameters": {"type": "object"},
        "strict": False,
    }
    body = {
        "model": MODEL,
        "instructions": "You are Codex.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "env"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        ],
        "tools": [
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
            {"type": "namespace", "name": "mcp__x", "description": "d", "tools": [function]},
            {"type": "image_generation", "output_format": "png"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    async with serving(generating("done", EOS)) as server:
        events = await streamed(server, **body)
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["tools"] == []
        assert prompt(server).startswith("system: You are Codex.\nrules\nuser: env\nfix it\n")
        probe = await server.post(RESPONSES, input=[], max_output_tokens=1, store=False)
        assert probe.status_code == 200


async def test_truncation_leaves_out_the_oldest_turns() -> None:
    """As few as needed; the system prompt and the last turn stay, and so does what is stored."""

    def turn(index: int, size: int = 40) -> list[dict[str, object]]:
        asked = {"role": "user", "content": f"q{index} " + "x" * size}
        return [asked, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": f"r{index}"}]  # fmt: skip

    body = {"instructions": "be kind", "max_output_tokens": 8, "input": [*turn(0), *turn(1), *turn(2), *turn(3)]}
    async with serving(generating("done", EOS)) as server:
        refused = await server.post(RESPONSES, **body)
        assert refused.json()["error"]["code"] in ("context_length_exceeded", "request_too_large")
        response = await server.post(RESPONSES, **body, truncation="auto")
        assert response.status_code == 200, response.text
        assert response.json()["truncation"] == "auto"
        sent = prompt(server)
        assert sent.startswith("system: be kind\nuser: q")
        kept = [index for index in range(4) if f"q{index} " in sent]
        assert 1 < len(kept) < 4
        assert kept == list(range(4 - len(kept), 4))
        assert len(sent) + 8 <= 256 < len(sent) + 8 + len(sent) // len(kept) - 8, "fewer would have fitted"
        alone = await server.post(RESPONSES, **{**body, "input": turn(0, 400)}, truncation="auto")
        assert alone.status_code == 400


@every(
    ("body", "param", "part"),
    [
        ({"input": 3}, "input", "a string or an array of items"),
        ({"input": None}, "input", "input is missing; send a text or an array of items"),
        ({"instructions": "a"}, "input", "input is missing"),
        ({"input": ["a"]}, "input[0]", "must be an item"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "web_search_call is not implemented"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "string"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role", "wizard"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].id", "send the item itself"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "srv-text:%"}]},
            "input[0].encrypted_content",
            "damaged",
        ),
        ({"input": "a", "include": ["file_search_call.results"]}, "include", "not implemented"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs", "send both or neither"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "a", "max_output_tokens": 999}, "max_output_tokens", "request at most"),
        ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata", "at most 16 entries"),
        ({"input": "a", "tools": [{"type": "mcp"}]}, "tools[0].type", "a tool that OpenAI runs"),
        ({"input": "a", "tools": [{"type": "shell"}]}, "tools[0].type", '"shell" is not implemented'),
        ({"input": "a", "tools": [3]}, "tools[0].type", "must be a string"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "no tool named f"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format", "must have the schema in schema"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": {}, "json_schema": {}}}},
            "text.format",
            "no other fields than type, name, schema, strict, description",
        ),
        (
            {
                "input": "a",
                "text": {"format": {"type": "json_schema", "schema": {}}},
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs.regex",
            "text.format.schema and structured_outputs.regex both constrain the output",
        ),
        ({"input": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "--grammar-backend"),
        ({"input": "a", "max_tool_calls": 0}, "max_tool_calls", "greater than or equal to 1"),
        ({"input": "a", "background": True}, "background", "not implemented"),
        ({"messages": [1]}, "messages", "called input"),
        ({"input": "a", "max_tokens": 1}, "max_tokens", "called max_output_tokens"),
    ],
)
async def test_a_bad_request_is_named(body: dict[str, Any], param: str, part: str) -> None:
    async with serving() as server:
        response = await server.http.post(RESPONSES, json=body)
        assert response.status_code in (400, 404)
        error = response.json()["error"]
        assert error["param"] == param
        assert part in error["message"]
        assert not server.engine.received


async def test_a_stream_that_fails_ends_with_a_failed_response() -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with serving(engine) as server:
        request = asyncio.create_task(streamed(server, input="a"))
        await eventually(lambda: engine.stats(0).generated_tokens > 3)
        engine.die()
        *_, last = await request
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "killed by signal 9" in last["response"]["error"]["message"]
        assert (await server.http.get(f"{RESPONSES}/{last['response']['id']}")).status_code == 404


async def test_a_format_of_the_text_becomes_the_grammar_of_the_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    async with serving() as server:
        for form, param in (({**schema_format, "schema": 3}, "text.format"), ({"type": "xml"}, "text.format")):
            refused = await server.post(RESPONSES, input="a", text={"format": form})
            assert refused.json()["error"]["param"] == param, refused.text
        off = await server.post(RESPONSES, input="a", text={"format": schema_format})
        assert (off.status_code, off.json()["error"]["code"]) == (400, "no_grammars")
        assert off.json()["error"]["param"] == "text.format.schema"
        plain = await server.post(RESPONSES, input="a", text={"format": {"type": "text"}}, max_output_tokens=1)
        assert plain.json()["text"] == {"format": {"type": "text"}}


def test_an_item_is_that_of_the_response_stored_last() -> None:
    store = ResponseStore()
    store.put("o", StoredResponse({"id": "1", "output": [{"id": "m", "text": "old"}]}, []))
    store.put("o", StoredResponse({"id": "2", "output": []}, [{"id": "m", "text": "new"}, {"text": "no id"}]))
    assert store.item("o", "m") == {"id": "m", "text": "new"}
    store.delete("o", "2")
    assert store.item("o", "m") == {"id": "m", "text": "old"}
    store.delete("o", "1")
    assert store.item("o", "m") is None


async def test_a_response_reports_the_sampling_that_it_had() -> None:
    async with serving(generating("a", EOS), sampling_defaults={"temperature": 0.25, "top_p": 0.5}) as server:
        first = (await server.post(RESPONSES, input="a")).json()
        assert (first["temperature"], first["top_p"]) == (0.25, 0.5)
        second = (await server.post(RESPONSES, input="a", temperature=0)).json()
        assert (second["temperature"], second["top_p"]) == (0, 0.5)


def test_an_owner_of_many_responses_displaces_no_other() -> None:
    def stored(name: str, text: str = "") -> StoredResponse:
        return StoredResponse({"id": name, "output": [{"id": f"i{name}", "text": text}]}, [])

    store = ResponseStore(max_responses=3)
    for owner, name in (("b", "kept"), *(("a", str(number)) for number in range(9))):
        store.put(owner, stored(name))
    assert [store.get("a", str(number)) is not None for number in range(9)] == [False] * 7 + [True] * 2
    assert store.get("b", "kept") is not None
    store = ResponseStore(max_bytes=1000)
    store.put("b", stored("kept", "x" * 100))
    for number in range(5):
        store.put("a", stored(str(number), "x" * 300))
    assert store.get("b", "kept") is not None
    assert len(store) == 3
    assert store.bytes <= 1000


async def test_allowed_tools_are_tools_of_the_request() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    async with serving(generating("done", EOS), reply_format=choose("hermes", None, ())) as server:
        for mode, names, why in (
            ("auto", ["g"], "tools has no tool named g"),
            ("required", ["f", "g"], "tools has no tool named g"),
            ("auto", [], "allowed_tools needs tools"),
        ):
            allowed = [{"type": "function", "name": name} for name in names]
            choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
            refused = await server.post(RESPONSES, input="hi", tools=tools, tool_choice=choice)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
            assert why in refused.json()["error"]["message"]
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
        accepted = await server.post(RESPONSES, input="hi", tools=tools, tool_choice=choice)
        assert accepted.status_code == 200, accepted.text


async def test_no_turn_is_invented_beside_an_input() -> None:
    async with serving(generating("done", EOS)) as server:
        await server.post(RESPONSES, input=[{"role": "system", "content": "Be brief."}])
        assert "user" not in prompt(server)
