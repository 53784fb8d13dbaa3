"""The process that checks grammars: `python -m srv.grammar.child`.

A Setup, then one `GrammarSource` after another, each answered by a Reply, in MessagePack. It does all that an engine
does with a grammar up to the first mask, so that an engine never sees a grammar that exceeds the limits or crashes its
library. The child ends when its standard input ends.
"""

from __future__ import annotations

import sys

import msgspec

from srv.errors import GrammarError
from srv.grammar.backend import GrammarBackend, GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.source import GrammarSource
from srv.io.bounded_child import ignore_signals, limit_memory, limit_time, read_frame, write_frame
from srv.types import Vocabulary


class Setup(msgspec.Struct):
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


class Reply(msgspec.Struct):
    """The translated grammar, or why there is none."""

    text: str | None = None
    refused: str = ""


def main() -> int:
    ignore_signals()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    if not (content := read_frame(source)):
        return 0
    setup = msgspec.msgpack.decode(content, type=Setup)
    backend = make(setup.backend, GrammarContext(setup.vocabulary, setup.vocab_size, setup.end_tokens))
    spacing = JsonSpacing(setup.whitespace_pattern, setup.no_whitespace)
    limit_memory(setup.memory_bytes)
    write_frame(sink, msgspec.msgpack.encode(Reply("")))
    while content := read_frame(source):
        limit_time(setup.processor_seconds)
        write_frame(sink, msgspec.msgpack.encode(_check(backend, spacing, content)))
        limit_time(0)
    return 0


def _check(backend: GrammarBackend, spacing: JsonSpacing, content: bytes) -> Reply:
    try:
        text = backend.translate(msgspec.msgpack.decode(content, type=GrammarSource), spacing)
        backend.compile(text)
    except GrammarError as error:
        return Reply(refused=str(error))
    except MemoryError:
        return Reply(refused="it needs too much memory")
    return Reply(text)


if __name__ == "__main__":
    sys.exit(main())
