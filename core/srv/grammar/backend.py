"""The protocol of grammar backends, and the facts of one that the registry knows.

Masks have one bit per token id, the lowest first, 1 if the token may be sampled, padded to whole 32-bit words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from srv.errors import EmptyGrammar, GrammarError
from srv.grammar.bounds import write_bounds
from srv.grammar.expanded import expand
from srv.grammar.formats import write_formats
from srv.grammar.merged import write_exclusive
from srv.grammar.schema_keywords import check_counts, check_shapes, drop_annotation_formats, has_large
from srv.grammar.source import GrammarSource
from srv.grammar.written import dump, load
from srv.types import Vocabulary

MAX_ERROR_LENGTH = 500

Masks = npt.NDArray[np.int32]  # [rows, words]


class JsonSpacing(NamedTuple):
    """White space between JSON tokens. `pattern`: a regular expression; None: the backend's. `none`: there is none."""

    pattern: str | None = None
    none: bool = False

    def pattern_of(self, source: GrammarSource, default: str) -> str:
        """That of a source, which goes first; "" for none. `default`: of the backend."""
        if source.whitespace_pattern is not None:
            return source.whitespace_pattern
        return "" if self.none else default if self.pattern is None else self.pattern


class GrammarContext(NamedTuple):
    """What a backend is made with. `vocab_size`: the width of the logits. `end_tokens`: they end an output."""

    vocabulary: Vocabulary
    vocab_size: int
    end_tokens: tuple[int, ...]


class Matcher(Protocol):
    """The state of one output. It does not raise: once it has failed, it accepts nothing."""

    def accept(self, tokens: Sequence[int]) -> bool:
        """Go on by these tokens. False if the grammar does not allow one of them."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether the output may end here."""
        ...

    @property
    def failure(self) -> str:
        """Why the matcher cannot go on: it has exceeded a limit, or got a token that the grammar forbids; else ""."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars and makes masks, for one vocabulary. Thread-safe."""

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        ...

    def translate(self, source: GrammarSource, spacing: JsonSpacing) -> str:
        """The text that `compile` takes. Raises GrammarError."""
        ...

    def compile(self, text: str) -> Callable[[], Any]:
        """A function that makes a `Matcher` in its first state. Raises GrammarError, such as EmptyGrammar."""
        ...

    def fill(self, matchers: Sequence[Any], masks: Masks) -> None:
        """Write the mask of each matcher into its row. End tokens are allowed where the output may end."""
        ...


def token_bytes(vocabulary: Vocabulary, vocab_size: int) -> list[bytes]:
    """The bytes of the token ids below `vocab_size`; none for those that the vocabulary lacks."""
    tokens: list[bytes] = []
    begin = 0
    for length in vocabulary.lengths[:vocab_size]:
        tokens.append(vocabulary.data[begin : begin + length])
        begin += length
    return tokens + [b""] * (vocab_size - len(tokens))


def mask_of(tokens: Sequence[int], words: int) -> npt.NDArray[np.int32]:
    """The mask [words] that allows only these tokens."""
    bits = np.zeros(words * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def parsed_schema(text: str, formats: frozenset[str] = frozenset()) -> dict[str, Any]:
    """A JSON schema from its text; {} for true. Raises GrammarError, also if it is no schema.

    formats: that the library enforces, of those that describe only (`ANNOTATION_FORMATS`); the others are left out.
    """
    try:
        schema = load(text)
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("it is not an object")
    if schema is False:
        raise EmptyGrammar
    return {} if schema is True else prepared_schema(schema, formats)


def prepared_schema(schema: dict[str, Any], formats: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The schema in a form of which libraries enforce more; as in `parsed_schema`. It is changed in place."""
    try:
        dump(schema).encode()
    except UnicodeEncodeError:
        raise GrammarError("it has a lone surrogate, which is not valid Unicode") from None
    has_large(schema)  # or has a number that is none
    check_shapes(schema)
    check_counts(schema)
    drop_annotation_formats(schema, formats)
    write_bounds(schema)
    write_formats(schema)
    expand(schema)
    write_exclusive(schema)
    return schema


def error_clause(error: str) -> str:
    """A library's message on one line, without the text that it quotes at length."""
    line = " ".join(error.split()) or "no text can follow it"
    return line if len(line) <= MAX_ERROR_LENGTH else f"{line[:MAX_ERROR_LENGTH]}..."
