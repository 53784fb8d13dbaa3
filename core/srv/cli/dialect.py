"""`--dialect` of `srv launch` and `srv plan`: the other flags are those of another engine.

Owns the flag, and finds devices for the conversion of sizes in bytes. `srv.args.dialects` translates the flags, and
`srv.args.command_line` parses the result together with the command line's own arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from srv.errors import Refusal, Rejection

if TYPE_CHECKING:
    from srv.args.dialects import Translation

_FLAG = "--dialect"
_HELP = "use the flags of another engine: rtp-llm, vllm or sglang"
_OWN_WORDS = ("-h", "--help", "--help-all", "--json")  # of `srv launch` and `srv plan`; they are not translated
_COMMANDS = ("launch", "plan")


def add_dialect(parser: argparse.ArgumentParser) -> None:
    """Add `--dialect` to the help of a command; `expand_dialect` removes it before the command line is parsed."""
    parser.add_argument(_FLAG, metavar="ENGINE", default=argparse.SUPPRESS, help=_HELP)


def expand_dialect(words: Sequence[str]) -> tuple[list[str], Translation | None]:
    """Split a command line into the words of `srv` itself, and the translation of the others if it has `--dialect`.

    Refusal if the engine is unknown. Refusals of untranslatable flags are in the translation, and are raised later
    together with all others.
    """
    if not words or words[0] not in _COMMANDS:
        return list(words), None
    dialect, foreign = _take_dialect(words[1:])
    if dialect is None:
        return list(words), None
    from srv.args.dialects import translate
    from srv.planning.target import find_target

    own_words = [word for word in foreign if word in _OWN_WORDS]
    foreign = [word for word in foreign if word not in _OWN_WORDS]
    translation = translate(dialect, foreign, lambda device: find_target(device).device.memory_bytes)
    return [words[0], *own_words, *translation.passthrough], translation


def _take_dialect(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The dialect that the words select, and the words without the flag."""
    for position, word in enumerate(words):
        flag, equals, attached = word.partition("=")
        if flag != _FLAG:
            continue
        after = words[position + 1 :]
        if not equals and not after:
            reason, remedy = "it has no value", f"Write {_FLAG} rtp-llm, {_FLAG} vllm or {_FLAG} sglang."
            raise Refusal([Rejection("missing_value", _FLAG, None, "command line", reason, remedy)])
        rest = after if equals else after[1:]
        return attached if equals else after[0], [*words[:position], *rest]
    return None, list(words)
