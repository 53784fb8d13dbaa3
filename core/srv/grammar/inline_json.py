"""JSON schemas within a grammar (`start: "x" %json {...}`), which llguidance adds to Lark and XGrammar takes too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from srv.errors import GrammarError
from srv.grammar.exact_numbers import exact_grammar

_BEGIN = re.compile(r"%json\b\s{0,99}(?=\{)")


def has_schemas(grammar: str) -> bool:
    return _BEGIN.search(grammar) is not None


def within_lark(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """A prepared schema as a part of llguidance's Lark. `options`: llguidance's for JSON schemas (`x-guidance`)."""
    if (grammar := exact_grammar(schema, options)) is not None:
        return f"%lark {{\n{grammar}\n}}"
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def with_schemas(grammar: str, write: Callable[[str], str]) -> str:
    """The grammar with `write(text of the schema)` in place of each `%json {...}`. Raises GrammarError."""
    decoder, parts, end = json.JSONDecoder(), list[str](), 0
    for begin in _BEGIN.finditer(grammar):
        if begin.start() < end:
            continue  # within a schema
        parts.append(grammar[end : begin.start()])
        try:
            _, end = decoder.raw_decode(grammar, begin.end())
        except ValueError as error:
            raise GrammarError(f"what follows %json is no JSON: {error}") from None
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        parts.append(write(grammar[begin.end() : end]))
    return "".join([*parts, grammar[end:]])
