"""`--dialect` of `srv launch` and `srv plan`: the flags that follow are those of another engine.

Finds devices, for sizes in bytes; what a foreign flag means is for `srv.args.dialects` to say, and what comes of it is
read beside the command line's own words (`srv.args.command_line`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from srv.errors import Refusal, Rejected

if TYPE_CHECKING:
    from srv.args.dialects import Translation

_FLAG = "--dialect"
_HELP = "the flags are those of another engine: rtp-llm, vllm or sglang"
_OWN_WORDS = ("-h", "--help", "--json")  # of `srv launch` and `srv plan`, in no dialect
_TAKERS = ("launch", "plan")


def add_dialect(parser: argparse.ArgumentParser) -> None:
    """Add `--dialect` to the help of a command; `expand_dialect` has taken it away before words are parsed."""
    parser.add_argument(_FLAG, metavar="ENGINE", default=argparse.SUPPRESS, help=_HELP)


def expand_dialect(words: Sequence[str]) -> tuple[list[str], Translation | None]:
    """The words that are those of `srv`, and what the others come to if they name a dialect.

    Refusal if no engine of that name is known. What cannot be translated is refused with everything else, later.
    """
    if not words or words[0] not in _TAKERS:
        return list(words), None
    dialect, foreign = _take_dialect(words[1:])
    if dialect is None:
        return list(words), None
    from srv.args.dialects import translate
    from srv.cli.plan import find_target

    kept = [word for word in foreign if word in _OWN_WORDS]
    foreign = [word for word in foreign if word not in _OWN_WORDS]
    translation = translate(dialect, foreign, lambda device: find_target(device).device.memory_bytes)
    return [words[0], *kept, *translation.passed], translation


def _take_dialect(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The dialect that the words name, and the words without it."""
    for position, word in enumerate(words):
        flag, equals, attached = word.partition("=")
        if flag != _FLAG:
            continue
        after = words[position + 1 :]
        if not equals and not after:
            reason, remedy = "no engine follows it", f"Write {_FLAG} rtp-llm, {_FLAG} vllm or {_FLAG} sglang."
            raise Refusal([Rejected("missing_value", _FLAG, None, "command line", reason, remedy)])
        rest = after if equals else after[1:]
        return attached if equals else after[0], [*words[:position], *rest]
    return None, list(words)
