"""The grammar backend on outlines-core: a finite automaton over tokens, made when a grammar is compiled.

Needs the extra `outlines`. It knows regular languages only: JSON schemas become regular expressions, and grammars and
structural tags are refused. Source: the documentation of outlines-core 0.2 (Apache 2.0), arXiv:2307.09702.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence

import outlines_core
from outlines_core.json_schema import build_regex_from_schema

from srv.errors import GrammarError
from srv.grammar.backend import GrammarContext, JsonSpacing, Masks, error_clause, mask_of, parsed_schema, token_bytes
from srv.grammar.schema_keywords import EnforcedKeywords, check_enforced
from srv.grammar.source import GrammarSource

# White space is bounded, because models repeat it without an end, and short, because automata grow with it.
DEFAULT_SPACING = r"[ \n]{0,8}"
_INNER_ANCHOR = re.compile(r"(?<!\\)(?<!\[)[\^$]")
_STRINGS = ("minLength", "maxLength")
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
                return source.text
            case "choice":
                return "|".join(map(re.escape, json.loads(source.text)))
        raise GrammarError("outlines has regular languages only, without grammars and structural tags; use llguidance")

    def compile(self, text: str) -> Callable[[], OutlinesMatcher]:
        try:
            first = outlines_core.Guide(outlines_core.Index(text, self._vocabulary))
            dead = not (first.is_finished() or first.get_tokens())
        except ValueError as error:
            raise GrammarError(error_clause(str(error))) from None
        if dead:
            raise GrammarError("it allows no text")
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
    schema = parsed_schema(source.text)
    try:
        check_enforced(schema, _ENFORCED, "outlines")
        _check_patterns(schema)
        pattern = source.whitespace_pattern or spacing.pattern or DEFAULT_SPACING
        found: str = build_regex_from_schema(json.dumps(schema), "" if _none(source, spacing) else pattern)
    except (ValueError, OSError) as error:
        raise GrammarError(error_clause(str(error))) from None
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    return found


def _check_patterns(schema: object) -> None:
    """A pattern becomes a part of one regular expression, so that it may have anchors at its ends alone."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            pattern = node.get("pattern")
            if isinstance(pattern, str) and _INNER_ANCHOR.search(pattern.removeprefix("^").removesuffix("$")):
                raise GrammarError(f"outlines takes no anchors within a pattern ({pattern[:40]!r}); use llguidance")
            if isinstance(pattern, str) and "|" in pattern and pattern != f"^({pattern[2:-2]})$":
                raise GrammarError(f"outlines takes alternatives only as ^(...)$, not {pattern[:40]!r}; use llguidance")
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _none(source: GrammarSource, spacing: JsonSpacing) -> bool:
    return source.whitespace_pattern is None and spacing.none
