"""Calls that a grammar forces, on a real server with a model of noise: whatever it writes is a valid call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bytes_model import write_model
from e2e_support import Server, launched

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {field: {"enum": ["x", "y"]}, "n": {"type": "boolean"}},
                "required": [field, "n"],
                "additionalProperties": False,
            },
        },
    }
    for name, field in (("first", "a"), ("second", "b"))
]
NAMED = {"type": "function", "function": {"name": "second"}}
DENSE = "--constrained-json-disable-any-whitespace"  # noise would spend its tokens on white space


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("model") / "bytes")
    log: Path = tmp_path_factory.mktemp("server") / "log"
    model = ("--device", "cpu", "--model-path", str(folder), "--load-format", "dummy", "--dtype", "float32")
    with launched(log, *model, DENSE, "--tool-call-parser", "hermes") as running:
        yield running


def choices(server: Server, **body: Any) -> list[dict[str, Any]]:
    hello = [{"role": "user", "content": "hi"}]
    response = server.post("/v1/chat/completions", messages=hello, tools=TOOLS, max_tokens=400, n=3, **body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def test_forced_calls_follow_their_schemas(server: Server) -> None:
    for choice, names in (("required", {"first", "second"}), (NAMED, {"second"})):
        for answer in choices(server, tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=3):
            assert answer["finish_reason"] == "tool_calls", answer
            (call,) = answer["message"]["tool_calls"]
            assert call["function"]["name"] in names
            arguments = json.loads(call["function"]["arguments"])
            field = "a" if call["function"]["name"] == "first" else "b"
            assert arguments.keys() == {field, "n"}
            assert arguments[field] in ("x", "y")
            assert isinstance(arguments["n"], bool)
            assert answer["message"]["content"] is None


def test_a_forced_call_excludes_another_grammar(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required"}
    response = server.post("/v1/chat/completions", **body, response_format={"type": "json_object"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    assert "both constrain the output" in response.json()["error"]["message"]
