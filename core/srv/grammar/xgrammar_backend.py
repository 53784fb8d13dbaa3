"""The grammar backend on XGrammar: pushdown automata, with masks that are mostly computed when a grammar is compiled.

Needs the extra `xgrammar`. A special token in a grammar is the text that it stands for. The library's classes of
characters admit bytes that are no UTF-8, and its free text admits any; masks leave such tokens out. Source: the
documentation of XGrammar 0.2 (Apache 2.0), arXiv:2411.15100.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import xgrammar

from srv.errors import EmptyGrammar, GrammarError
from srv.grammar.anchors import whole
from srv.grammar.backend import (
    GrammarContext,
    JsonSpacing,
    Masks,
    error_clause,
    mask_of,
    parsed_schema,
    prepared_schema,
    token_bytes,
)
from srv.grammar.inline_json import has_schemas
from srv.grammar.json_strings import in_json
from srv.grammar.schema_keywords import EnforcedKeywords, check_enforced
from srv.grammar.source import GrammarSource
from srv.grammar.structural import from_structures, only
from srv.grammar.utf8 import NO_TEXT, START, Utf8Tokens
from srv.grammar.written import load
from srv.json_schema import below

MAX_SPACES = 1  # in a row: models repeat them where they may, until the output has no room for its end
DEFAULT_SPACING = r"[ \n\r\t]?"  # what the library writes for it
_WIDE_COMMA = '((", " basic_'  # of values of any type, whatever the separators
# Of a pattern, by which the library drops what is no JSON, and escapes with it: none of ours matches what is no JSON.
_PRUNED = '$", json_string=true)'
_STRINGS = ("minLength", "maxLength")
# In patterns of schemas, more repetitions allow control characters, and an optional group may lose its first part.
_BLOCK = 100
_PLAIN_NAME = re.compile(r"[ !#-\[\]-~]*")
_ESCAPED = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_COUNTS = re.compile(r"(\d+)(?=,?\d*\})")
_OPTIONAL_GROUP = re.compile(rf"({_ESCAPED.pattern})|\)\?", re.DOTALL)
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
            *("uri-reference", "uri-template"),  # its JSON pointers have control characters
        }
    ),
    alone=frozenset({"$ref", "anyOf"}),
    float_text=lambda number: f"{number:.17g}",
    exclusive=(
        *((left, right) for left in ("pattern", "format") for right in _STRINGS),
        ("pattern", "format"),
        ("properties", "patternProperties"),
    ),
)


class XgrammarMatcher:
    """See `srv.grammar.backend.Matcher`."""

    __slots__ = ("_refused", "_text", "native", "state")

    def __init__(self, native: xgrammar.GrammarMatcher, text: Utf8Tokens) -> None:
        self.native, self._text, self._refused = native, text, ""
        self.state = START  # of the text in UTF-8

    def accept(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if self._refused or not self._takes(token):
                self._refused = self._refused or f"the grammar does not allow token {token} there"
                return False
        return True

    def _takes(self, token: int) -> bool:
        state = self._text.after(self.state, token)
        if state == NO_TEXT or self.native.is_terminated() or not self.native.accept_token(token):
            return False
        self.state = state
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
        tokens = token_bytes(context.vocabulary, context.vocab_size)
        self._info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=context.vocab_size,
            stop_token_ids=list(context.end_tokens),
        )
        # The engine caches what is compiled, and compiles on threads of its own.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._only_end = mask_of(context.end_tokens, self.words)
        self._text = Utf8Tokens(tokens, self.words)

    @property
    def words(self) -> int:
        return int((self._info.vocab_size + 31) // 32)

    def translate(self, source: GrammarSource, spacing: JsonSpacing) -> str:
        try:
            return json.dumps(self._translate(source, spacing), ensure_ascii=False)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None

    def _translate(self, source: GrammarSource, spacing: JsonSpacing) -> dict[str, Any]:
        if source.kind in ("grammar", "structural_tag") and has_schemas(source.text):
            raise GrammarError("xgrammar enforces too little of a schema behind %json; use llguidance")
        match source.kind:
            case "json_schema":
                schema = parsed_schema(source.text, _ENFORCED.formats)
                return {"kind": "ebnf", "text": _json_grammar(schema, _has_spaces(source, spacing))}
            case "regex":
                return {"kind": "regex", "text": whole(source.text)}
            case "choice":
                return {"kind": "ebnf", "text": "root ::= " + " | ".join(map(json.dumps, json.loads(source.text)))}
            case "grammar":
                return {"kind": "ebnf" if "::=" in source.text else "lark", "text": source.text}
            case "structural_tag":
                tag = _written_tag(source.text, lambda: _has_spaces(source, spacing))
                return {"kind": "tag", "text": json.dumps(tag)}

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
            raise EmptyGrammar
        return lambda: XgrammarMatcher(xgrammar.GrammarMatcher(compiled), self._text)

    def _compiled(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        match kind:
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
        return bool((masks & self._text.masks[START]).any())

    def fill(self, matchers: Sequence[XgrammarMatcher], masks: Masks) -> None:
        for row, matcher in enumerate(matchers):
            if matcher.failure or matcher.native.is_terminated():
                masks[row] = self._only_end
            else:
                matcher.native.fill_next_token_bitmask(masks, row)
                masks[row] &= self._text.masks[matcher.state]


def make_backend(context: GrammarContext) -> XgrammarBackend:
    return XgrammarBackend(context)


def _enforced(schema: Any) -> Any:
    """The schema, changed in place. Raises GrammarError if something of it would be passed over."""
    check_enforced(schema, _ENFORCED, "xgrammar")
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            names = [name for name in node.get("properties", ()) if not _PLAIN_NAME.fullmatch(name)]
            if names and node.get("additionalProperties", True) is not False:  # others could have the same name
                raise GrammarError(f"xgrammar takes the name {names[0][:40]!r} in closed objects only; use llguidance")
            if any(name in node for name in _STRINGS):  # they would allow control characters, which are no JSON
                node["pattern"] = in_json(_lengths(int(node.pop("minLength", 0)), node.pop("maxLength", None)))
            elif "pattern" in node:
                node["pattern"] = _pattern(node["pattern"])
            if "patternProperties" in node:
                node["patternProperties"] = {_pattern(name): part for name, part in node["patternProperties"].items()}
            waiting += [part for part, _ in below(node, "")]
    return schema


def _lengths(least: int, most: float | None) -> str:
    """A pattern of the texts with these lengths."""
    blocks, rest = divmod(least, _BLOCK)
    parts = [f"(.{{{_BLOCK}}}){{{blocks}}}" if blocks else "", f".{{{rest}}}" if rest else ""]
    if most is None:
        return f"^{''.join(parts)}.*$"
    if most < least:
        raise EmptyGrammar("minLength is above maxLength")
    blocks, rest = divmod(int(most) - least, _BLOCK)
    parts += [f"(.{{{_BLOCK}}}){{0,{blocks - 1}}}.{{0,{_BLOCK}}}" if blocks else "", f".{{0,{rest}}}" if rest else ""]
    return f"^{''.join(parts)}$"


def _pattern(pattern: str) -> str:
    """A pattern in a form that the library reads as it is meant. Raises GrammarError for one that has none."""
    if any(int(count) > _BLOCK for count in _COUNTS.findall(_ESCAPED.sub("", pattern))):
        raise GrammarError(f"xgrammar takes no repetition beyond {_BLOCK} in a pattern; use the backend llguidance")
    return f"^{_OPTIONAL_GROUP.sub(lambda match: match[1] or '){0,1}', in_json(whole(pattern, '.*')))}$"


def _has_spaces(source: GrammarSource, spacing: JsonSpacing) -> bool:
    """Whether there is white space between the tokens of JSON."""
    pattern = spacing.pattern_of(source, DEFAULT_SPACING)
    if pattern not in ("", DEFAULT_SPACING):
        raise GrammarError("xgrammar takes no pattern for white space; use the backend llguidance")
    return bool(pattern)


def _json_grammar(schema: dict[str, Any], spaces: bool) -> str:
    """A prepared schema as a grammar in EBNF. Raises GrammarError if something of it would be passed over."""
    text = json.dumps(_enforced(schema))
    separators = None if spaces else (",", ":")
    try:
        grammar = xgrammar.Grammar.from_json_schema(
            text, any_whitespace=spaces, separators=separators, strict_mode=False, max_whitespace_cnt=MAX_SPACES
        )
    except RuntimeError as error:
        raise GrammarError(error_clause(_without_place(str(error)))) from None
    text = str(grammar).replace(_PRUNED, '$")')
    return text if spaces else text.replace(_WIDE_COMMA, '(("," basic_')


def _written_tag(text: str, spaces: Callable[[], bool]) -> Any:
    """A structural tag with grammars in place of its schemas: the library's own would have other white space, and would
    take objects as closed. Refuses schemas of which something would be passed over."""
    try:
        tag = load(text)
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    if isinstance(tag, dict) and "structures" in tag:
        tag = {"type": "structural_tag", "format": from_structures(tag)}
    waiting = [tag]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            match node.get("type"):
                case "json_schema":
                    grammar = _schema_in_tag(node, spaces())
                    node.clear()
                    node.update(type="grammar", grammar=grammar)
                case kind if "json_schema" in node:
                    raise GrammarError(f"xgrammar enforces schemas in the format json_schema only, not in {kind!r}")
                case "regex" if isinstance(node.get("pattern"), str):
                    node["pattern"] = whole(node["pattern"])
                case _:
                    waiting += node.values()
    return tag


def _schema_in_tag(node: dict[str, Any], spaces: bool) -> str:
    only(node, ("type", "json_schema", "strict"), "the format json_schema")
    schema = node.get("json_schema")
    if schema is False:
        raise EmptyGrammar
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise GrammarError("a schema is an object")
    return _json_grammar(prepared_schema(schema, _ENFORCED.formats), spaces)


def _without_place(message: str) -> str:
    """Without the time and the line of the library's source that begin its messages."""
    return message.partition(": ")[2] if message.startswith("[") and ".cc:" in message else message
