"""The header that tells clients what of their schemas is not enforced, from each endpoint, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batch_support import ended, line, results, start
from server_support import serving

from srv.grammar.source import GrammarSource
from srv.server.request.grammar_rules import NOT_ENFORCED, not_enforced
from srv.server.request.grammars import CheckedGrammar, Grammars
from srv.types import Grammar

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
HELLO = [{"role": "user", "content": "hi"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TEXT = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
LEFT_OUT = ("uniqueItems", 'pattern ^é"\n\x7f')


async def test_every_endpoint_names_what_is_not_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    strict: list[bool] = []

    async def check(grammars: Grammars, source: GrammarSource, *more: Any) -> CheckedGrammar:
        strict.append(source.strict)
        return CheckedGrammar(Grammar("g"), None, () if source.strict else LEFT_OUT)

    monkeypatch.setattr(Grammars, "check", check)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HELLO, "response_format": FORMAT, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "response_format": FORMAT, "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "text": TEXT, "max_output_tokens": 2}),
    ]
    enforced = {"type": "json_schema", "json_schema": {**FORMAT["json_schema"], "strict": True}}  # type: ignore[dict-item]
    async with serving() as server:
        for path, body in bodies:
            for stream in (False, True):
                answer = await server.post(path, **body, stream=stream)
                assert answer.status_code == 200, answer.text
                assert json.loads(answer.headers[NOT_ENFORCED]) == list(LEFT_OUT)
        path, body = bodies[0]
        for form in (enforced, {"type": "json_object"}):
            answer = await server.post(path, **{**body, "response_format": form})
            assert NOT_ENFORCED not in answer.headers
        guided = await server.post("/v1/completions", prompt="a", guided_json=SCHEMA, max_tokens=2)
        assert NOT_ENFORCED not in guided.headers
    assert strict == [False] * 6 + [True] * 3


async def test_lines_of_a_batch_have_the_header_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(grammars: Grammars, source: GrammarSource, *more: Any) -> CheckedGrammar:
        return CheckedGrammar(Grammar("g"), None, LEFT_OUT)

    monkeypatch.setattr(Grammars, "check", check)
    lines = [line("schema", prompt="a", max_tokens=2, response_format=FORMAT), line("none", prompt="a", max_tokens=2)]
    async with serving(file_storage_path=tmp_path) as server:
        entries = await results(server, (await ended(server, await start(server, *lines)))["output_file_id"])
        assert json.loads(entries["schema"]["response"]["headers"][NOT_ENFORCED]) == list(LEFT_OUT)
        assert "headers" not in entries["none"]["response"]


def test_the_header_is_short_and_in_ascii() -> None:
    one = CheckedGrammar(Grammar("g"), None, tuple(f"pattern {number} {'ü' * 500}" for number in range(100)))
    header = not_enforced([None, one, one])[NOT_ENFORCED]
    assert header.isascii()
    assert header.isprintable()
    assert len(header) < 20_000
    assert len(json.loads(header)) == 32
    assert not_enforced([None, CheckedGrammar(Grammar("g"), None)]) == {}
