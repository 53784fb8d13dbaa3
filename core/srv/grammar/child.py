"""The process that checks grammars: `python -m srv.grammar.child`.

A `GrammarSetup`, then one `GrammarSource` after another, each answered by a `GrammarReply`, in MessagePack. It does all
that an engine does with a grammar up to the first masks, so that an engine never sees a grammar that crashes its
library or exceeds the limits at once. The child ends when its standard input ends.
"""

from __future__ import annotations

import functools
import random
import sys
import traceback
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from srv.errors import GrammarError
from srv.grammar.ahead import Progress, next_masks
from srv.grammar.backend import GrammarBackend, GrammarContext, JsonSpacing, Matcher, error_clause
from srv.grammar.registry import make
from srv.grammar.relaxed import relaxed
from srv.grammar.source import GrammarSource
from srv.io.bounded_child import (
    channels,
    ignore_signals,
    limit_memory,
    limit_time,
    read_frame,
    with_small_stack,
    write_frame,
)
from srv.types import Vocabulary

TRIED_TOKENS = 32


class GrammarSetup(msgspec.Struct):
    """The backend and what it is made with, and the limits per grammar: processor time in seconds, and bytes of memory
    beyond what the process has at its start."""

    backend: str
    vocabulary: Vocabulary
    vocab_size: int
    end_tokens: tuple[int, ...]
    whitespace_pattern: str | None
    no_whitespace: bool
    processor_seconds: float
    memory_bytes: int


class GrammarReply(msgspec.Struct):
    """The translated grammar, what it does not enforce and whether its masks may be slow; or why there is none."""

    text: str | None = None
    refused: str = ""
    left_out: tuple[str, ...] = ()
    slow: bool = False


def main() -> int:
    ignore_signals()
    source, sink = channels()
    if not (content := read_frame(source)):
        return 0
    setup = msgspec.msgpack.decode(content, type=GrammarSetup)
    backend = make(setup.backend, GrammarContext(setup.vocabulary, setup.vocab_size, setup.end_tokens))
    spacing = JsonSpacing(setup.whitespace_pattern, setup.no_whitespace)
    limit_memory(setup.memory_bytes)
    write_frame(sink, msgspec.msgpack.encode(GrammarReply("")))

    def work() -> None:
        while content := read_frame(source):
            limit_time(setup.processor_seconds)
            write_frame(sink, msgspec.msgpack.encode(_check(backend, spacing, setup.end_tokens, content)))
            limit_time(0)

    return with_small_stack(work)


def _check(backend: GrammarBackend, spacing: JsonSpacing, end_tokens: Sequence[int], content: bytes) -> GrammarReply:
    try:
        request = msgspec.msgpack.decode(content, type=GrammarSource)
        compiled = functools.lru_cache(maxsize=1)(lambda grammar_text: _compiled(backend, grammar_text, spacing))
        source, left_out = relaxed(request, compiled)
        text, new = compiled(source)
        slow = try_out(backend, new, end_tokens)
    except GrammarError as error:
        return GrammarReply(refused=str(error))
    except MemoryError:
        return GrammarReply(refused="it needs too much memory")
    except RecursionError:
        return GrammarReply(refused="it is nested too deeply")
    except Exception as error:  # noqa: BLE001 - a fault ends one request, not the process that others wait for
        traceback.print_exc()
        return GrammarReply(refused=f"it cannot be checked: {type(error).__name__}: {error_clause(str(error))}")
    return GrammarReply(text, left_out=tuple(dict.fromkeys((*request.left_out, *left_out))), slow=slow)


def _compiled(
    backend: GrammarBackend, source: GrammarSource, spacing: JsonSpacing
) -> tuple[str, Callable[[], Matcher]]:
    text = backend.translate(source, spacing)
    return text, backend.compile(text)


def try_out(backend: GrammarBackend, new: Callable[[], Matcher], end_tokens: Sequence[int]) -> bool:
    """Follow the grammar for some tokens at random, always the same ones. Raises GrammarError if it cannot go on.

    Returns whether one of their masks was slow."""
    choice, slow = random.Random(0), False
    output = Progress(new(), jumps=False)
    for count in range(TRIED_TOKENS):
        masks = next_masks(backend, [output], end_tokens)
        if output.failure:
            raise GrammarError(f"it cannot go on after {count} tokens: {error_clause(output.failure)}")
        slow = slow or output.time.slow
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        going_on = np.setdiff1d(allowed, end_tokens)
        if not len(going_on):
            break
        output.accept([int(choice.choice(going_on))])
    return slow


if __name__ == "__main__":
    sys.exit(main())
