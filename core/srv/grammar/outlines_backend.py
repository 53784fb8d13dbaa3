"""The grammar backend on outlines-core: a finite automaton over tokens, made when a grammar is compiled.

Needs the extra `outlines`. It knows regular languages only: JSON schemas become regular expressions, and grammars and
structural tags are refused. Source: the documentation of outlines-core 0.2 (Apache 2.0), arXiv:2307.09702.

The library prefers earlier alternatives (`a|ab` has no `ab`), and forbids a token whose last byte follows a place where
the text could end, unless it could end behind it, too (`(ab)*` has no `a`). Neither holds for a pattern that matches
only at the end of the text (`$`). It compiles no such pattern that may be empty, so that a mark stands before each, as
a token of its own, which a matcher has behind it from the start.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import outlines_core
from outlines_core.json_schema import build_regex_from_schema

from srv.errors import EmptyGrammar, GrammarError
from srv.grammar.anchors import whole
from srv.grammar.backend import GrammarContext, JsonSpacing, Masks, error_clause, mask_of, parsed_schema, token_bytes
from srv.grammar.formats import TIME
from srv.grammar.json_strings import in_json
from srv.grammar.schema_keywords import EnforcedKeywords, check_enforced
from srv.grammar.source import GrammarSource
from srv.json_schema import ANNOTATIONS, TYPES, below

# At most one blank at a place: models repeat white space where they may, until the output has no room for its end.
DEFAULT_SPACING = "[ ]?"
_BEGIN = "\U0010fffe"  # a character of none
_STRINGS = ("minLength", "maxLength")
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
# The library's own allow characters that end a JSON string.
_FORMATS = {
    "time": f"^{TIME}$",
    "email": rf"^{_ATOM}(\.{_ATOM})*@({_LABEL}\.)+{_LABEL}$",
    "uri": "^[A-Za-z][A-Za-z0-9+.-]*:(//)?[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]+$",
}
_ENFORCED = EnforcedKeywords(
    keywords=frozenset(
        {
            *("type", "enum", "const", "$ref", "anyOf", "pattern", "format", *_STRINGS),
            *("properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
        }
    ),
    formats=frozenset({"date", "time", "date-time", "uuid", "uri", "email"}),
    alone=frozenset({"$ref", "anyOf"}),
    exclusive=(*((left, right) for left in ("pattern", "format") for right in _STRINGS), ("pattern", "format")),
    booleans=False,
)


class OutlinesMatcher:
    """See `srv.grammar.backend.Matcher`."""

    __slots__ = ("_end_tokens", "_refused", "ended", "native")

    def __init__(self, native: outlines_core.Guide, end_tokens: frozenset[int]) -> None:
        self.native, self._end_tokens, self._refused, self.ended = native, end_tokens, "", False

    def accept(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if self._refused or not self._takes(token):
                self._refused = self._refused or f"the grammar does not allow token {token} there"
                return False
        return True

    def _takes(self, token: int) -> bool:
        if self.ended:
            return False
        if token in self._end_tokens:
            self.ended = self.native.is_finished()
            return self.ended
        try:
            self.native.advance(token, False)
        except ValueError:
            return False
        return True

    @property
    def accepting(self) -> bool:
        return not self._refused and (self.ended or self.native.is_finished())

    @property
    def failure(self) -> str:
        return self._refused


class OutlinesBackend:
    """See `srv.grammar.backend.GrammarBackend`."""

    def __init__(self, context: GrammarContext) -> None:
        self._words = (context.vocab_size + 31) // 32
        self._end_tokens = frozenset(context.end_tokens)
        special = self._end_tokens | set(context.vocabulary.special)
        ids: dict[bytes, list[int]] = {}
        for token, data in enumerate(token_bytes(context.vocabulary, context.vocab_size)):
            if data and token not in special:
                ids.setdefault(data, []).append(token)
        self._begin = 32 * self._words  # the id of the mark, which no mask has
        ids.setdefault(_BEGIN.encode(), []).append(self._begin)
        self._vocabulary = outlines_core.Vocabulary(context.end_tokens[0], ids)
        self._only_end = mask_of(context.end_tokens, self._words)

    @property
    def words(self) -> int:
        return self._words

    def translate(self, source: GrammarSource, spacing: JsonSpacing) -> str:
        match source.kind:
            case "json_schema":
                return _json_pattern(source, spacing)
            case "regex":
                return whole(source.text)
            case "choice":
                return "|".join(map(re.escape, json.loads(source.text)))
        raise GrammarError("outlines has regular languages only, without grammars and structural tags; use llguidance")

    def compile(self, text: str) -> Callable[[], OutlinesMatcher]:
        try:
            first = outlines_core.Guide(outlines_core.Index(f"{_BEGIN}(?:{text})$", self._vocabulary))
            if self._begin not in first.get_tokens():
                raise EmptyGrammar
            first.advance(self._begin, False)
            dead = not (first.is_finished() or set(first.get_tokens()) - {self._begin})
        except ValueError as error:
            raise GrammarError(error_clause(str(error))) from None
        if dead:
            raise EmptyGrammar
        return lambda: OutlinesMatcher(copy.copy(first), self._end_tokens)

    def fill(self, matchers: Sequence[OutlinesMatcher], masks: Masks) -> None:
        begin, size = masks.ctypes.data, masks.shape[1] * 4
        for row, matcher in enumerate(matchers):
            if matcher.failure or matcher.ended:
                masks[row] = self._only_end
                continue
            matcher.native.write_mask_into(begin + row * size, masks.shape[1], 4)
            if matcher.native.is_finished():
                masks[row] |= self._only_end


def make_backend(context: GrammarContext) -> OutlinesBackend:
    return OutlinesBackend(context)


def _json_pattern(source: GrammarSource, spacing: JsonSpacing) -> str:
    try:
        schema = parsed_schema(source.text, _ENFORCED.formats)
        check_enforced(schema, _ENFORCED, "outlines")
        _rewrite(schema)
        pattern: str = build_regex_from_schema(json.dumps(schema), spacing.pattern_of(source, DEFAULT_SPACING))
    except (TypeError, ValueError, OSError) as error:  # the first: of a number that the library cannot read
        raise GrammarError(error_clause(str(error))) from None
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    return pattern


def _rewrite(schema: object) -> None:
    """Put JSON text in the place of patterns and names, which the library writes between quotation marks as they are.

    Of the anchors of a pattern, the library knows those around it. A schema of any value gets its types: without them,
    the library writes alternatives that the rest of an object does not hold together.
    """
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if not node.keys() - ANNOTATIONS:
                node["type"] = [name for name in TYPES if name != "integer"]
            if node.get("format") in _FORMATS:
                node["pattern"] = _FORMATS[node.pop("format")]
            if "pattern" in node:
                node["pattern"] = f"^({in_json(whole(node['pattern'], '.*'))})$"
            if "properties" in node:
                node["properties"] = {_in_quotes(name): part for name, part in node["properties"].items()}
            if "required" in node:
                node["required"] = list(map(_in_quotes, node["required"]))
            for name in ("const", "enum"):
                if name in node:
                    node[name] = _with_names(node[name])
            waiting += [part for part, _ in below(node, "")]


def _in_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _with_names(value: Any) -> Any:
    """A constant whose names are patterns, as the library takes them there."""
    if isinstance(value, list):
        return list(map(_with_names, value))
    if isinstance(value, dict):
        return {re.escape(_in_quotes(name)): _with_names(part) for name, part in value.items()}
    return value
