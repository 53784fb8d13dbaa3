"""`/v1/messages` over the fake engine: the message, the order of events, errors, and what Claude Code sends."""

from __future__ import annotations

from typing import Any

import pytest
from every import every
from server_support import MODEL, Serving, eventually, generating, prompt, serving

from srv.errors import RequestError
from srv.io.messages import Abort, Finish
from srv.testing.fake_engine import EOS, ByteTokenizer, FakeEngine

pytestmark = pytest.mark.anyio
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": HELLO}


async def streamed(server: Serving, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name, payload) of each event."""
    response = await server.http.post(MESSAGES, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return named_events(response.text)


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    import json

    pairs = [block.split("\n") for block in text.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


async def test_a_message_has_anthropics_form() -> None:
    engine = generating("Hello!", EOS)
    engine.cached_tokens = 3
    async with serving(engine) as server:
        response = await server.post(MESSAGES, **BODY, system="be brief")
        message = response.json()
        assert response.headers["request-id"].startswith("req_")
        assert message.pop("id").startswith("msg_")
        assert message == {
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": "Hello!"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": len("system: be brief\nuser: hi\nassistant: ") - 3,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 3,
                "output_tokens": 7,
            },
        }
        assert prompt(server) == "system: be brief\nuser: hi\nassistant: "


async def test_a_stream_has_the_events_of_a_message_in_their_order() -> None:
    async with serving(generating("Hey", EOS)) as server:
        events = await streamed(server, **BODY)
        assert [name for name, _ in events] == [
            "message_start",
            "content_block_start",
            "ping",
            *["content_block_delta"] * 3,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert all(name == payload["type"] for name, payload in events)
        start = events[0][1]["message"]
        assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
        assert start["usage"]["input_tokens"] > 0
        assert events[1][1] == {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        }
        deltas = [payload["delta"] for name, payload in events if name == "content_block_delta"]
        assert deltas == [{"type": "text_delta", "text": letter} for letter in "Hey"]
        assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert events[-2][1]["usage"]["output_tokens"] == 4


@every(
    ("text", "fields", "reason", "sequence"),
    [
        ("one", {}, "end_turn", None),
        ("a STOP b", {"stop_sequences": ["STOP"]}, "stop_sequence", "STOP"),
        ("abcdefghijk", {}, "max_tokens", None),
        ("x" * 500, {"max_tokens": 100_000}, "model_context_window_exceeded", None),
    ],
)
async def test_stop_reasons(text: str, fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    async with serving(generating(text, EOS)) as server:
        whole = (await server.post(MESSAGES, **{**BODY, **fields})).json()
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        events = await streamed(server, **{**BODY, **fields})
        assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
        text_of = "".join(payload["delta"]["text"] for name, payload in events if name == "content_block_delta")
        assert text_of == whole["content"][0]["text"]


async def test_an_empty_reply_has_an_empty_block() -> None:
    async with serving(generating("", EOS)) as server:
        assert (await server.post(MESSAGES, **BODY)).json()["content"] == [{"type": "text", "text": ""}]
        names = [name for name, _ in await streamed(server, **BODY)]
        assert names[1:4] == ["content_block_start", "ping", "content_block_stop"]


async def test_what_claude_code_sends() -> None:
    """The form of its requests; the billing block and the breakpoints of the cache must not change the prompt."""
    body = {
        "model": MODEL,
        "max_tokens": 32_000,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0a1b2;"},
            {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": [
            {"role": "ctx", "content": "context"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>be kind</system-reminder>"},
                    {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "yes"}],
            },
            {"role": "system", "content": "<total_tokens>9 tokens left</total_tokens>"},
            {"role": "msg", "content": "go on"},
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "user_1"},
        "temperature": 1,
        "tools": [],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14,other-2026-01-01"}
    async with serving(generating("done", EOS)) as server:
        assert (await server.http.head("/")).status_code == 200
        response = await server.http.post(f"{MESSAGES}?beta=true", json=body, headers=headers)
        assert response.status_code == 200, response.text
        rendered = prompt(server)
        assert rendered == (
            "system: You help.\nuser: context\n<system-reminder>be kind</system-reminder>\nhi\nassistant: yes\n"
            "system: <total_tokens>9 tokens left</total_tokens>\nuser: go on\nassistant: "
        )
        counted = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking")}
        count = await server.http.post(f"{COUNT}?beta=true", json=counted, headers=headers)
        assert count.json() == {"input_tokens": len(rendered)}


class _Strict(ByteTokenizer):
    """Its template refuses system messages in the middle, as many do."""

    def apply_chat_template(self, messages: list[dict[str, object]], **more: Any) -> str:
        if any(message["role"] == "system" for message in messages[1:]):
            raise RequestError("System message must be at the beginning", code="chat_template_error")
        return super().apply_chat_template(messages, **more)


async def test_a_system_message_that_a_template_refuses_in_the_middle_is_the_users() -> None:
    messages = [*HELLO, {"role": "system", "content": "9 left"}, {"role": "user", "content": "go"}]
    async with serving(text=_Strict()) as server:
        response = await server.post(MESSAGES, **{**BODY, "messages": messages}, system="S")
        assert response.status_code == 200, response.text
        assert prompt(server) == "system: S\nuser: hi\n9 left\ngo\nassistant: "


async def test_a_reply_that_the_client_began_is_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
    async with serving(generating("B)", EOS)) as server:
        answer = (await server.post(MESSAGES, **{**BODY, "messages": messages})).json()
        assert answer["content"][0]["text"] == "B)"
        assert prompt(server) == "user: hi\nassistant: The answer is ("
        for content in ("", " \n"):
            body = {**BODY, "messages": [*HELLO, {"role": "assistant", "content": content}]}
            refused = await server.post(MESSAGES, **body)
            assert "no text that can be continued" in refused.json()["error"]["message"]


class Closing(ByteTokenizer):
    """Its template ends each message with a marker."""

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool = True, variables: Any = None) -> str:
        lines = [f"<|im_start|>{message['role']}\n{message['content'].strip()}<|im_end|>\n" for message in messages]
        return "".join(lines) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


@every("begun", ["<", "im", "hi", "end \n"])
async def test_what_the_template_writes_after_a_begun_reply_is_no_part_of_it(begun: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    async with serving(generating("x", EOS), Closing()) as server:
        assert (await server.post(MESSAGES, **{**BODY, "messages": messages})).status_code == 200
        before = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert prompt(server) == before + begun.rstrip()


async def test_errors_have_anthropics_form_and_the_request_id_of_their_header() -> None:
    async with serving(key_for_tests := None, model_name=MODEL) as server:
        assert key_for_tests is None
        for body, status, kind, part in (
            ({**BODY, "model": "gpt-9"}, 404, "not_found_error", "gpt-9 is not served"),
            ({**BODY, "max_tokens": 0}, 400, "invalid_request_error", "max_tokens = 0"),
            ({"model": MODEL, "messages": HELLO}, 400, "invalid_request_error", "max_tokens is required"),
            ({**BODY, "stop": ["a"]}, 400, "invalid_request_error", "called stop_sequences"),
            ({**BODY, "n": 2}, 400, "invalid_request_error", "n is not implemented"),
            ({**BODY, "messages": [{"role": "user", "content": "x" * 300}]}, 400, "invalid_request_error", "256"),
        ):
            response = await server.http.post(MESSAGES, json=body)
            error = response.json()
            assert response.status_code == status
            assert error == {
                "type": "error",
                "error": {"type": kind, "message": error["error"]["message"]},
                "request_id": response.headers["request-id"],
            }
            assert part in error["error"]["message"]
        unknown = await server.http.get("/v1/messages/batches")
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        assert (await server.http.get("/v1/nothing")).json()["error"].keys() == {"message", "type", "param", "code"}


async def test_a_key_is_missing_in_anthropics_form() -> None:
    from srv.server.http.access import Access

    async with serving(access=Access(key="k")) as server:
        refused = await server.http.post(MESSAGES, json=BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert (await server.http.post(MESSAGES, json=BODY, headers={"x-api-key": "k"})).status_code == 200


async def test_documents_of_plain_text_are_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "The sky is blue."}
    parts = {"type": "content", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}
    content = [
        {"type": "document", "source": plain, "title": "Sky", "context": "A note.", "citations": {"enabled": False}},
        {"type": "document", "source": parts},
        {"type": "text", "text": "Sum up."},
    ]
    async with serving(generating("done", EOS)) as server:
        response = await server.post(MESSAGES, **{**BODY, "messages": [{"role": "user", "content": content}]})
        assert response.status_code == 200, response.text
        assert "user: Sky\nA note.\nThe sky is blue.\nOne.\nTwo.\nSum up." in prompt(server)


@every(
    ("content", "part"),
    [
        (3, "messages[0].content must be a string or an array of blocks, not an integer"),
        ([3], 'messages[0].content[0] must be a block like {"type": "text"'),
        ([{"type": "image", "source": {}}], 'messages[0].content[0].type = "image" is refused'),
        ([{"type": "thinking", "thinking": "t"}], "does not belong there; send text or tool_result"),
        ([{"type": "text"}], "messages[0].content[0].text is required"),
        ([{"type": "document", "source": {"type": "base64"}}], 'source.type = "base64" is not implemented; send plain'),
        ([{"type": "document", "source": 3}], "messages[0].content[0].source.type"),
        (
            [{"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}],
            "messages[0].content[0].source.content[0].type",
        ),
        (
            [{"type": "document", "source": {"type": "text", "media_type": "text/plain"}}],
            "messages[0].content[0].source.data is required",
        ),
        ([{"type": "text", "text": "a", "txt": 1}], "unknown field messages[0].content[0].txt"),
        ([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}], "content[0].content[0].type"),
    ],
)
async def test_a_bad_block_is_named(content: object, part: str) -> None:
    async with serving() as server:
        for path in (MESSAGES, COUNT):
            body = {name: value for name, value in BODY.items() if path == MESSAGES or name != "max_tokens"}
            response = await server.post(path, **{**body, "messages": [{"role": "user", "content": content}]})
            assert response.status_code == 400
            assert part in response.json()["error"]["message"]
        assert not server.engine.received


async def test_an_error_of_the_engine_ends_a_stream_with_an_error_event() -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with serving(engine) as server:
        import asyncio

        request = asyncio.create_task(server.http.post(MESSAGES, json={**BODY, "max_tokens": 200, "stream": True}))
        await eventually(lambda: engine.stats(0).generated_tokens > 3)
        engine.die()
        name, payload = named_events((await request).text)[-1]
        assert (name, payload["type"], payload["error"]["type"]) == ("error", "error", "overloaded_error")


@every("stream", [False, True])
async def test_a_reply_that_is_aborted_has_no_stop_reason_of_its_own(stream: bool) -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with serving(engine) as server:
        import asyncio

        body = {**BODY, "max_tokens": 200, "rid": "r", "stream": stream}
        request = asyncio.create_task(server.http.post(MESSAGES, json=body))
        await eventually(lambda: engine.stats(0).generated_tokens > 3)
        await server.post("/abort_request", rid="r")
        response = await request
        if stream:
            name, payload = named_events(response.text)[-1]
            assert name == "error"
        else:
            assert response.status_code == 499
            payload = response.json()
        assert "aborted" in payload["error"]["message"]
        assert [message for message in engine.received if isinstance(message, Abort | Finish)]


async def test_a_format_of_the_output_becomes_its_grammar() -> None:
    schema_format = {"type": "json_schema", "schema": {"type": "object"}}
    async with serving() as server:
        for fields in ({"output_config": {"format": schema_format}}, {"output_format": schema_format}):
            off = await server.post(MESSAGES, **BODY, **fields)
            assert off.status_code == 400
            assert "output_config.format.schema is refused" in off.json()["error"]["message"]
        other = {"type": "json_schema", "schema": {"type": "object", "minProperties": 1}}
        two = await server.post(MESSAGES, **BODY, output_config={"format": schema_format}, output_format=other)
        assert "output_format is refused with another output_config.format" in two.json()["error"]["message"]
        refused = await server.post(MESSAGES, **BODY, output_config={"format": {"type": "json_object"}})
        assert 'an object of type "json_schema" with a schema' in refused.json()["error"]["message"]
