"""The texts that a pattern allows, with any tokens: those that Python's `re` matches as a whole, and no others."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import numpy as np
import pytest
from every import every

from srv.grammar.backend import GrammarBackend, GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.source import GrammarSource
from srv.types import Vocabulary

LONGEST = 4
TEXTS = [bytes(text) for size in range(LONGEST + 1) for text in itertools.product(b"abc", repeat=size)]
BYTES = [bytes([byte]) for byte in range(256)]
VOCABULARIES = {"bytes": [], "pairs": [b"ab", b"ca"], "overlapping": [b"bc", b"aa", b"abc"]}
NAMED = ("(ab)*", "(ab|c)*", "(aa)*|b", "a|ab", "(ab){0,2}", "x?(ab)*", "", "(|a)(b|)", "a*?b", "(a|b|ab)(c|bcc)?")


def drawn(draw: random.Random, depth: int = 0) -> str:
    """A pattern over a, b and c."""
    kind = draw.random()
    if depth > 3 or kind < 0.3:
        return draw.choice(["a", "b", "c", "[ab]", "[a-c]"])
    if kind < 0.5:
        return drawn(draw, depth + 1) + drawn(draw, depth + 1)
    if kind < 0.7:
        return f"({drawn(draw, depth + 1)}|{drawn(draw, depth + 1)})"
    return f"({drawn(draw, depth + 1)}){draw.choice(['*', '+', '?', '{2}', '{1,3}', '{0,2}'])}"


def language(backend: GrammarBackend, tokens: list[bytes], pattern: str) -> set[bytes]:
    """The texts up to LONGEST that the masks lead to."""
    source = GrammarSource(kind="regex", text=pattern, param="test")
    new = backend.compile(backend.translate(source, JsonSpacing()))
    end, texts = len(tokens), set[bytes]()
    waiting: list[tuple[tuple[int, ...], bytes]] = [((), b"")]
    masks = np.empty((1, backend.words), dtype=np.int32)
    while waiting:
        path, text = waiting.pop()
        state: Any = new()
        assert state.accept(path), (pattern, text)
        backend.fill([state], masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()
        assert state.accepting == (end in allowed), (pattern, text)
        texts |= {text} if end in allowed else set()
        waiting += [
            ((*path, token), text + tokens[token])
            for token in allowed
            if token != end and len(text + tokens[token]) <= LONGEST
        ]
    return texts


@every("name", ["llguidance", "xgrammar", "outlines"])
@every("vocabulary", VOCABULARIES)
def test_a_pattern_allows_what_it_matches_and_nothing_else(name: str, vocabulary: str) -> None:
    pytest.importorskip({"outlines": "outlines_core"}.get(name, name), reason=f"{name} is not installed")
    tokens = [*BYTES, *VOCABULARIES[vocabulary]]
    context = GrammarContext(Vocabulary(b"".join(tokens), list(map(len, tokens)), []), len(tokens) + 1, (len(tokens),))
    backend, draw = make(name, context), random.Random(5)
    for pattern in (*NAMED, *(drawn(draw) for _ in range(25))):
        expected = {text for text in TEXTS if re.fullmatch(pattern.encode(), text)}
        texts = language(backend, tokens, pattern)
        assert {text for text in texts if set(text) <= set(b"abc")} == expected, pattern
