"""No argument turns a constraint that the API accepts into free text.

The launches together have every value of an argument that the conformance kit tries, as far as it is accepted for a
model of noise: what follows a constraint does so because of the grammar.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest
import torch
from bytes_model import write_model
from transformers import AutoConfig, AutoModelForCausalLM

from srv.args.statement import UserStatement
from srv.models.read import read_facts
from srv.testing.conformance.arguments import accepted_values, group_into_launches, serving, shown
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.server import Server
from srv.testing.conformance.values import user_statement

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "act", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "act"}}
BASE = (
    user_statement("constrained_json_disable_any_whitespace", True),  # noise would spend its tokens on white space
    user_statement("tool_call_parser", "hermes"),
)
Launch = tuple[Sequence[UserStatement], Collection[str]]  # with the codes by which constraints may be refused
REGEX = "[0-9]{3}-[a-f]{2}"
CHAT: Mapping[str, Any] = MappingProxyType({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200})
TEXT: Mapping[str, Any] = MappingProxyType({"prompt": "x", "max_tokens": 200})
CONSTRAINTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("/v1/chat/completions", {**CHAT, "response_format": FORMAT}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"json": SCHEMA}}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"regex": REGEX}}),
    ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": NAMED}),
    ("/v1/completions", {**TEXT, "response_format": FORMAT}),
    ("/v1/completions", {**TEXT, "guided_regex": REGEX}),
    ("/generate", {"input_ids": [97], "sampling_params": {"regex": REGEX, "max_new_tokens": 200}}),
)
# Values under which some constraints are refused, with the codes; each has a launch of its own. Under all others but
# parsers, each constraint is followed.
REFUSED_UNDER = {
    ("grammar_backend", "none"): ("no_grammars", "no_tool_format"),
    ("grammar_backend", "outlines"): ("invalid_grammar", "no_tool_format"),  # it has regular languages only
    ("skip_tokenizer_init", "True"): ("no_tokenizer", "no_tool_format", "invalid_grammar"),
}
# Under these, an answer may end before its constraint begins, and calls of some formats cannot be forced.
PARSERS = ("reasoning_parser", "tool_call_parser")
NO_GRAMMAR_OF_CALLS = ("not_implemented",)


def follows(body: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Whether an answer follows its constraint. One that ends while it reasons has not come to it."""
    if "choices" not in answer:
        return re.fullmatch(REGEX, answer["text"]) is not None
    (choice,) = answer["choices"]
    message = choice.get("message", {})
    if message.get("reasoning_content") and not message.get("content") and not message.get("tool_calls"):
        return True
    if "tools" in body:
        calls = message.get("tool_calls") or ()
        whole = calls[:-1] if choice["finish_reason"] == "length" else calls  # noise makes one call after the other
        return bool(calls) and all(_fits(tool_call["function"]["arguments"]) for tool_call in whole)
    text = (choice["text"] if "text" in choice else message["content"]) or ""
    if "guided_regex" in body or "regex" in body.get("structured_outputs", ()):
        return re.fullmatch(REGEX, text) is not None
    return _fits(text)


def _fits(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def faults(server: Server, codes: Collection[str]) -> Iterator[str]:
    """Constraints that an answer does not follow, or that are refused with another code than these."""
    for path, body in CONSTRAINTS:
        status, answer = server.request(path, body)
        if status == 200 and follows(body, answer):
            continue
        if status != 200 and 400 <= status < 500 and answer["error"]["code"] in codes:
            continue
        yield f"{path} {dict(body)}: {status} {answer}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("SRV_")]:
        monkeypatch.delenv(name)
    folder = write_model(tmp_path / "bytes")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.mark.proof(minutes=3)
@pytest.mark.timeout(900)
def test_each_constraint_is_followed_or_refused_under_every_argument(folder: Path, tmp_path: Path) -> None:
    kit, facts = Kit("cpu", tmp_path), read_facts(folder)
    values = accepted_values(kit, facts)
    alone = [value for value in values if (value.argument, str(value.value)) in REFUSED_UNDER]
    parsers = [value for value in values if value.argument in PARSERS]
    others = [value for value in values if value not in alone and value not in parsers]
    assert len(alone) == len(REFUSED_UNDER)
    assert any((other.argument, other.value) == ("is_embedding", True) for other in others)
    launches: list[Launch] = [(launch, ()) for launch in group_into_launches(kit, facts, others)]
    launches += [(launch, NO_GRAMMAR_OF_CALLS) for launch in group_into_launches(kit, facts, parsers)]
    launches += [([statement], REFUSED_UNDER[statement.argument, str(statement.value)]) for statement in alone]
    problems: list[str] = []
    for launch, codes in launches:
        named = {statement.argument for statement in launch}
        base = [statement for statement in BASE if statement.argument not in named and launch[0] not in alone]
        with serving(kit, folder, [*launch, *base]) as server:
            problems += [f"{', '.join(map(shown, launch))}: {fault}" for fault in faults(server, codes)]
    assert problems == []
