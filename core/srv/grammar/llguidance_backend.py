"""The grammar backend on llguidance: an Earley parser over a lexer of derivatives, with limits on every step.

Owns the translation of sources into llguidance's languages, and its limits. Sources: docs/syntax.md and
docs/json_schema.md of llguidance 1.9 (MIT).
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from srv.errors import EmptyGrammar, GrammarError
from srv.grammar.backend import GrammarContext, JsonSpacing, Masks, error_clause, mask_of, parsed_schema, token_bytes
from srv.grammar.exact_numbers import exact_grammar
from srv.grammar.inline_json import with_schemas, within_lark
from srv.grammar.json_strings import write_sets
from srv.grammar.lark import lark_text
from srv.grammar.source import GrammarSource
from srv.grammar.structural import LarkWriter

# Of a forced text, this many bytes and twice the longest token are split into tokens.
FORCED_BYTES = 64

# At most one blank at a place: models repeat white space where they may, until the output has no room for its end.
DEFAULT_SPACING = " "

_QUOTED_LINE = re.compile(r"\n *\d+ \| ")

# Fuel is about 14,000 units per millisecond, and a lexer state about 2 kB. Items take 4 microseconds each if many of
# them are one row's, and schemas need some hundreds.
_LIMITS: dict[str, Any] = {
    "step_max_items": 20_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


class _Tokens:
    """The vocabulary in the form that llguidance reads."""

    def __init__(self, context: GrammarContext) -> None:
        self.tokens = token_bytes(context.vocabulary, context.vocab_size)
        self.special_token_ids = sorted({*context.vocabulary.special, *context.end_tokens})
        self.special_token_ids = [token for token in self.special_token_ids if token < context.vocab_size]
        for token in self.special_token_ids:
            self.tokens[token] = self.tokens[token] or f"<|special {token}|>".encode()
        self.eos_token_id = context.end_tokens[0]
        self.bos_token_id = None
        special = frozenset(self.special_token_ids)
        self._ids = {data: token for token, data in enumerate(self.tokens) if data and token not in special}
        self._longest: dict[int, int] = {}  # token of those that begin with a byte
        for data in self._ids:
            self._longest[data[0]] = max(self._longest.get(data[0], 0), len(data))
        # The library cuts off the end that a longer token could cover, and a mask needs the first token of the rest.
        self.most_bytes = 2 * max(self._longest.values(), default=1) + FORCED_BYTES
        self._split = functools.lru_cache(maxsize=1024)(self._split_now)  # each mask asks for the same text again

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text that the grammar forces: the longest one at each place, which need not be the model's.

        A text may be as long as the grammar's limits allow, and this runs for each mask: only its begin is split.
        """
        data = text[: self.most_bytes].encode() if isinstance(text, str) else text
        return self._split(data[: self.most_bytes])

    def _split_now(self, data: bytes) -> list[int]:
        text_tokens: list[int] = []
        begin = 0
        while begin < len(data):
            for end in range(min(len(data), begin + self._longest.get(data[begin], 0)), begin, -1):
                if (token := self._ids.get(data[begin:end])) is not None:
                    text_tokens.append(token)
                    begin = end
                    break
            else:
                break  # the vocabulary lacks this byte
        return text_tokens


class LlguidanceMatcher:
    """See `srv.grammar.backend.Matcher`."""

    __slots__ = ("_refused", "native")

    def __init__(self, native: llguidance.LLMatcher) -> None:
        self.native, self._refused = native, ""

    def accept(self, tokens: Sequence[int]) -> bool:
        if self._refused:
            return False
        count = self.native.try_consume_tokens(list(tokens))
        if count == len(tokens):
            return True
        error = self.native.get_error()
        self._refused = _clause(error) if error else f"the grammar does not allow token {tokens[count]} there"
        return False

    @property
    def accepting(self) -> bool:
        return not self.failure and self.native.is_accepting()

    @property
    def failure(self) -> str:
        if not self._refused and self.native.is_error():
            self._refused = _clause(self.native.get_error())
        return self._refused


class LlguidanceBackend:
    """See `srv.grammar.backend.GrammarBackend`."""

    def __init__(self, context: GrammarContext) -> None:
        tokens = _Tokens(context)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(tokens),
            n_vocab=context.vocab_size,
            eos_token=list(context.end_tokens),
        )
        self._special = {tokens.tokens[token].decode("utf-8", "replace"): token for token in tokens.special_token_ids}
        # With few processors, handing masks to another thread costs more than it saves.
        self._executor = llguidance.LLExecutor() if (os.cpu_count() or 1) > 4 else None
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._only_end = mask_of(context.end_tokens, self.words)

    @property
    def words(self) -> int:
        return (self._tokenizer.vocab_size + 31) // 32

    def translate(self, source: GrammarSource, spacing: JsonSpacing) -> str:
        try:
            return self._translate(source, spacing)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        except UnicodeEncodeError:  # JSON may have it as an escape, which the library cannot take
            raise GrammarError("it has a lone surrogate, which is not valid Unicode") from None

    def _translate(self, source: GrammarSource, spacing: JsonSpacing) -> str:
        match source.kind:
            case "json_schema":
                return _json_grammar(source.text, _json_options(source, spacing))
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(_unanchored(source.text))
            case "choice":
                options = " | ".join(map(lark_text, json.loads(source.text)))
                return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}\n")
            case "grammar":
                return llguidance.LLMatcher.grammar_from_lark(_lark(source.text, _json_options(source, spacing)))
            case "structural_tag":
                settings = _json_options(source, spacing)
                writer = LarkWriter(self._special, settings, functools.partial(_lark, options=settings))
                return llguidance.LLMatcher.grammar_from_lark(writer.grammar(source.text))

    def compile(self, text: str) -> Callable[[], LlguidanceMatcher]:
        first = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not first.is_error():
            first.compute_bitmask()  # it finds out whether any text is allowed, and fills caches that copies share
        if first.is_error():
            raise _refusal(_clause(first.get_error()))
        return lambda: LlguidanceMatcher(first.deep_copy())

    def fill(self, matchers: Sequence[LlguidanceMatcher], masks: Masks) -> None:
        pending = [(matcher.native, row) for row, matcher in enumerate(matchers) if not matcher.failure]
        begin, size = masks.ctypes.data, masks.shape[1] * 4
        if self._executor is None or len(pending) == 1:
            for native, row in pending:
                native.unsafe_compute_mask_ptr(begin + row * size, size)
        else:
            self._executor.unsafe_compute_mask_ptr(pending, begin, size, masks.shape[0])
        for row, matcher in enumerate(matchers):
            if matcher.failure:  # the output ends, and is invalid
                masks[row] = self._only_end


def make_backend(context: GrammarContext) -> LlguidanceBackend:
    return LlguidanceBackend(context)


def _json_options(source: GrammarSource, spacing: JsonSpacing) -> dict[str, Any]:
    pattern = spacing.pattern_of(source, DEFAULT_SPACING)
    return {"whitespace_flexible": True, "whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}


def _json_schema(text: str) -> dict[str, Any]:
    schema = parsed_schema(text)
    if "x-guidance" in schema:
        raise GrammarError('it has the key "x-guidance", which is not a keyword of JSON Schema')
    write_sets(schema)
    return schema


def _json_grammar(text: str, options: dict[str, Any]) -> str:
    schema = _json_schema(text)
    if (grammar := exact_grammar(schema, options)) is not None:
        return llguidance.LLMatcher.grammar_from_lark(grammar)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=cast(Any, options))
    except ValueError as error:
        raise GrammarError(_clause(str(error))) from None


def _lark(text: str, options: dict[str, Any]) -> str:
    """A Lark grammar, or EBNF with a rule `root` translated to it. `options`: of the JSON schemas in it."""
    try:
        return str(any_to_lark(with_schemas(text, lambda schema: within_lark(_json_schema(schema), options))))
    except GrammarError:
        raise
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - the converter raises bare exceptions
        raise GrammarError(f"it is neither Lark nor EBNF: {_clause(str(error))}") from None


def _unanchored(pattern: str) -> str:
    """Without `^` and `$` around it: a whole output matches in any case."""
    pattern = pattern.removeprefix("^")
    backslashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and backslashes % 2 == 0 else pattern


def _clause(error: str) -> str:
    """The library's message on one line, without the lines that it quotes of a grammar that `translate` wrote."""
    return error_clause(_QUOTED_LINE.split(error.replace("<non-verbose/>", ""), maxsplit=1)[0])


def _refusal(clause: str) -> GrammarError:
    if clause.startswith("NoExtension"):
        return EmptyGrammar()
    return EmptyGrammar(clause) if "Unsatisfiable" in clause else GrammarError(clause)
