"""What a grammar cannot be combined with is refused by the name of the client's field, before the grammar is built."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from srv.errors import RequestError
from srv.grammar.source import GrammarSource
from srv.server.request.grammar_rules import checked_grammar
from srv.server.request.sampling_fields import Sampling

SOURCE = GrammarSource(kind="regex", text="a+", param="guided_regex")


async def _check(source: GrammarSource, owner: str) -> str:
    return f"checked {source.text} of {owner}"


def checked(**fields: Any) -> object:
    grammars: Any = SimpleNamespace(check=_check, check_backend=lambda name: None)
    return asyncio.run(checked_grammar(grammars, Sampling(**fields), lambda name: f"options.{name}", "b"))


def test_without_a_grammar_everything_can_be_combined() -> None:
    assert checked(ignore_eos=True, min_tokens=3) is None
    assert checked(grammar=SOURCE, max_tokens=1) == "checked a+ of b"


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("ignore_eos", True, "options.ignore_eos"),
        ("min_tokens", 1, "options.min_tokens"),
        ("allowed_token_ids", (5,), "options.allowed_token_ids"),
        ("bad_words", ("x",), "options.bad_words"),
        ("max_tokens", 0, "options.max_tokens = 0"),
    ],
)
def test_a_contradiction_is_refused_by_its_field(name: str, value: object, named: str) -> None:
    with pytest.raises(RequestError) as refusal:
        checked(grammar=SOURCE, **{name: value})
    assert str(refusal.value).startswith(f"{named} is refused with guided_regex: ")
    assert (refusal.value.code, refusal.value.param) == ("invalid_value", f"options.{name}")
