"""Bodies of Messages and Responses in which anything may stand anywhere: each gets an answer, never a 500."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from every import every
from server_support import MODEL, serving

from srv.reply.formats import choose
from srv.server.settings import GrammarSettings
from srv.testing.fake_engine import EOS, ByteTokenizer, FakeEngine

pytestmark = pytest.mark.anyio
ROUNDS = 400
MESSAGES = {
    "model": MODEL,
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]}],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
}
RESPONSES = {
    "input": [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "o"},
        {"type": "item_reference", "id": "msg_1"},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "g", "format": {"type": "text"}},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "metadata": {"a": "b"},
    "previous_response_id": "resp_1",
    "max_output_tokens": 3,
}
VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**20, "", "a", "\0", "é" * 300, [], [[]], {}, {"type": "text"}, {"a": None}),
    *([None], [{}], [1, "a"], {"type": []}, {"type": "text", "text": 1}, "{", {"id": {}}, [{"type": "tool_use"}]),
]


def changed(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The body with one to three of its values replaced, removed, doubled or added."""
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        holder: Any = body
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            inner = [key for key in keys if isinstance(holder[key], dict | list) and holder[key]]
            if not inner or draw.random() < 0.3:
                break
            holder = holder[draw.choice(inner)]
        if not keys:
            continue
        key = draw.choice(keys)
        match draw.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case 2 if isinstance(holder, dict):
                holder[draw.choice(["type", "id", "content", "zzz", "role"])] = copy.deepcopy(draw.choice(VALUES))
            case _:
                holder[key] = copy.deepcopy(draw.choice(VALUES))
    return body


@every(
    ("path", "body"),
    [
        ("/v1/messages", MESSAGES),
        ("/v1/messages/count_tokens", {name: MESSAGES[name] for name in ("model", "messages", "tools", "system")}),
        ("/v1/responses", RESPONSES),
        ("/v1/responses/input_tokens", RESPONSES),
    ],
)
async def test_any_body_gets_an_answer(path: str, body: dict[str, Any]) -> None:
    draw = random.Random(path)
    engine = FakeEngine(script=lambda message: [*b"ok", EOS])
    formats = choose("hermes", "qwen3", ())
    grammars = GrammarSettings("llguidance", vocab_size=ByteTokenizer.vocab_size, end_tokens=(EOS,))
    limits = {"context_length": 4096, "max_request_tokens": 4096}
    async with serving(engine, reply_format=formats, grammars=grammars, **limits) as server:
        statuses = {200: 0, 400: 0, 404: 0}
        valid = {name: value for name, value in body.items() if name != "previous_response_id"}
        if "input" in valid:
            valid["input"] = valid["input"][:-1]
        assert (await server.post(path, **valid)).status_code == 200
        for _ in range(ROUNDS):
            sent = changed(valid if draw.random() < 0.9 else body, draw)
            if not path.endswith("tokens") and draw.random() < 0.2:
                sent["stream"] = True
            response = await server.http.post(path, json=sent)
            assert response.status_code in statuses, (sent, response.text)
            statuses[response.status_code] += 1
            if response.status_code != 200:
                assert response.json()["error"]["message"], sent
        assert min(statuses[200], statuses[400]) > ROUNDS // 10, statuses
