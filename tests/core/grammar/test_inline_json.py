"""A JSON schema within a Lark grammar is enforced as one of its own, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from every import every

from srv.errors import GrammarError
from srv.grammar.backend import GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.source import GrammarSource
from srv.types import Vocabulary

CONTEXT = GrammarContext(Vocabulary(bytes(range(256)), [1] * 256, []), 257, (256,))
SPACED = JsonSpacing()
LLGUIDANCE = make("llguidance", CONTEXT)


def grammar(schema: Any) -> GrammarSource:
    return GrammarSource(kind="grammar", text=f'start: "<" %json {json.dumps(schema)} ">" | "a"', param="test")


def takes(source: GrammarSource, text: str, spacing: JsonSpacing = SPACED) -> bool:
    matcher = LLGUIDANCE.compile(LLGUIDANCE.translate(source, spacing))()
    return matcher.accept(list(text.encode())) and matcher.accepting


@every(
    ("schema", "right", "wrong"),
    [
        ({"type": "object", "properties": {"a": {"const": 1}}}, '{"a": 1}', '{"a":  1}'),
        ({"not": {"const": "a"}, "type": "string"}, '"b"', '"a"'),
        ({"enum": ["%json {", "x"]}, '"%json {"', '"y"'),
        ({"type": "string", "format": "date"}, '"2024-04-30"', '"2024-04-31"'),
        ({"minimum": 10**29, "maximum": 10**30, "type": "integer"}, "1" + "0" * 29, "9223372036854775807"),
        ({"const": 2**70}, str(2**70), "1180591620717411300000"),
    ],
)
def test_a_schema_in_a_grammar_is_that_of_a_request(schema: Any, right: str, wrong: str) -> None:
    source = grammar(schema)
    assert takes(source, f"<{right}>")
    assert takes(source, "a")
    assert not takes(source, f"<{wrong}>")


def test_white_space_is_the_servers() -> None:
    source = grammar({"type": "array", "items": {"const": 1}})
    assert takes(source, "<[1, 1]>")
    assert not takes(source, "<[1, 1]>", JsonSpacing(none=True))


@every(
    ("schema", "why"),
    [
        ({"type": "objekt"}, "the name of a type"),
        ({"x-guidance": {}}, "x-guidance"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_what_is_refused_in_a_schema_is_refused_in_a_grammar(schema: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        takes(grammar(schema), "a")


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(GrammarError, match="no JSON"):
        takes(GrammarSource(kind="grammar", text="start: %json {a}", param="test"), "a")


def test_xgrammar_refuses_schemas_in_grammars() -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    assert xgrammar
    with pytest.raises(GrammarError, match="use llguidance"):
        make("xgrammar", CONTEXT).translate(grammar({"type": "object"}), JsonSpacing())
