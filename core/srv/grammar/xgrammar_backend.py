"""The grammar backend on XGrammar: pushdown automata, with masks that are mostly computed when a grammar is compiled.

Needs the extra `xgrammar`. A special token in a grammar is the text that it stands for. Source: the documentation of
XGrammar 0.2 (Apache 2.0), arXiv:2411.15100.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import xgrammar

from srv.errors import GrammarError
from srv.grammar.backend import GrammarContext, JsonSpacing, Masks, error_clause, mask_of, parsed_schema, token_bytes
from srv.grammar.schema_keywords import EnforcedKeywords, check_enforced
from srv.grammar.source import GrammarSource

MAX_SPACES = 64  # in a row, because models repeat them without an end
_STRINGS = ("minLength", "maxLength")
_ENFORCED = EnforcedKeywords(
    keywords=frozenset(
        {
            *("type", "enum", "const", "$ref", "anyOf", "pattern", "format", *_STRINGS),
            *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
            *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
            *("minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"),
        }
    ),
    formats=frozenset(
        {
            *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"),
            *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
        }
    ),
    alone=frozenset({"$ref", "anyOf"}),
    exclusive=(
        *((left, right) for left in ("pattern", "format") for right in _STRINGS),
        ("pattern", "format"),
        ("properties", "patternProperties"),
    ),
)


class XgrammarMatcher:
    """See `srv.grammar.backend.Matcher`."""

    __slots__ = ("_refused", "native")

    def __init__(self, native: xgrammar.GrammarMatcher) -> None:
        self.native, self._refused = native, ""

    def accept(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if self._refused or self.native.is_terminated() or not self.native.accept_token(token):
                self._refused = self._refused or f"the grammar does not allow token {token} there"
                return False
        return True

    @property
    def accepting(self) -> bool:
        return not self._refused and self.native.is_completed()

    @property
    def failure(self) -> str:
        return self._refused


class XgrammarBackend:
    """See `srv.grammar.backend.GrammarBackend`."""

    def __init__(self, context: GrammarContext) -> None:
        self._info = xgrammar.TokenizerInfo(
            token_bytes(context.vocabulary, context.vocab_size),
            xgrammar.VocabType.RAW,
            vocab_size=context.vocab_size,
            stop_token_ids=list(context.end_tokens),
        )
        # The engine caches what is compiled, and compiles on threads of its own.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._only_end = mask_of(context.end_tokens, self.words)

    @property
    def words(self) -> int:
        return int((self._info.vocab_size + 31) // 32)

    def translate(self, source: GrammarSource, spacing: JsonSpacing) -> str:
        try:
            return json.dumps(self._translate(source, spacing), ensure_ascii=False)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None

    def _translate(self, source: GrammarSource, spacing: JsonSpacing) -> dict[str, Any]:
        match source.kind:
            case "json_schema":
                schema = parsed_schema(source.text)
                if source.whitespace_pattern is not None or spacing.pattern is not None:
                    raise GrammarError("xgrammar takes no pattern for white space; use the backend llguidance")
                check_enforced(schema, _ENFORCED, "xgrammar")
                return {"kind": "json", "text": json.dumps(schema), "spaces": not spacing.none}
            case "regex":
                return {"kind": "regex", "text": source.text}
            case "choice":
                return {"kind": "ebnf", "text": "root ::= " + " | ".join(map(json.dumps, json.loads(source.text)))}
            case "grammar":
                return {"kind": "ebnf" if "::=" in source.text else "lark", "text": source.text}
            case "structural_tag":
                _check_tag(source.text)
                return {"kind": "tag", "text": source.text}

    def compile(self, text: str) -> Callable[[], XgrammarMatcher]:
        try:
            compiled = self._compiled(**json.loads(text))
            matcher = xgrammar.GrammarMatcher(compiled)
            # It finds out whether any text is allowed.
            dead = not (matcher.is_completed() or self._fills(matcher))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises RuntimeError for every mistake in a grammar
            raise GrammarError(error_clause(_without_place(str(error)))) from None
        if dead:
            raise GrammarError("it allows no text")
        return lambda: XgrammarMatcher(xgrammar.GrammarMatcher(compiled))

    def _compiled(self, kind: str, text: str, spaces: bool = True) -> xgrammar.CompiledGrammar:
        match kind:
            case "json":
                return self._compiler.compile_json_schema(
                    text,
                    any_whitespace=spaces,
                    separators=None if spaces else (",", ":"),
                    strict_mode=False,
                    max_whitespace_cnt=MAX_SPACES,
                )
            case "regex":
                return self._compiler.compile_regex(text)
            case "ebnf":
                return self._compiler.compile_grammar(text)
            case "lark":
                return self._compiler.compile_lark(text)
        return self._compiler.compile_structural_tag(text)

    def _fills(self, matcher: xgrammar.GrammarMatcher) -> bool:
        masks = self._only_end[None].copy()
        matcher.fill_next_token_bitmask(masks, 0)
        return bool(masks.any())

    def fill(self, matchers: Sequence[XgrammarMatcher], masks: Masks) -> None:
        for row, matcher in enumerate(matchers):
            if matcher.failure or matcher.native.is_terminated():
                masks[row] = self._only_end
            else:
                matcher.native.fill_next_token_bitmask(masks, row)


def make_backend(context: GrammarContext) -> XgrammarBackend:
    return XgrammarBackend(context)


def _check_tag(text: str) -> None:
    """Refuse schemas inside a structural tag of which something would be passed over."""
    try:
        waiting: list[Any] = [json.loads(text)]
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            for name, value in node.items():
                if name in ("json_schema", "schema"):
                    check_enforced(value, _ENFORCED, "xgrammar")
                else:
                    waiting.append(value)
        elif isinstance(node, list):
            waiting += node


def _without_place(message: str) -> str:
    """Without the time and the line of the library's source that begin its messages."""
    return message.partition(": ")[2] if message.startswith("[") and ".cc:" in message else message
