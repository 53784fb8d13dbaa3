"""argparse with our manners. Knows no argument: `srv.args.cli` and the commands fill it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Set
from typing import Any, NoReturn

from srv.errors import Refusal, Rejected

SOURCE = "command line"
HELP = ("-h", "--help")


class Parser(argparse.ArgumentParser):
    """argparse with our manners: no abbreviated flags, and errors are refusals.

    What `fill` adds is added when the parser is first used, and where words are parsed only the flags that are among
    them: a command line uses one subcommand and few of its flags, and the others would cost time for nothing.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        named["allow_abbrev"] = False
        self._fill: list[Callable[[Set[str] | None], None]] = []
        super().__init__(*positional, **named)

    def fill(self, add: Callable[[Set[str] | None], None]) -> None:
        """Let `add` add arguments to this parser before it is first used.

        `add(words)` may leave out flags that are not among the words; None asks for all.
        """
        self._fill.append(add)

    def complete(self, words: Set[str] | None = None) -> None:
        """Add what was put off and is wanted now."""
        for add in self._fill:
            add(words)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; called for the program's words and, by argparse, for a subcommand's."""
        words = sys.argv[1:] if args is None else list(args)
        flags = {word.partition("=")[0] for word in words}
        self.complete(None if flags & set(HELP) else flags)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        self.complete()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise Refusal([Rejected("bad_command_line", self.prog, None, SOURCE, message, f"See `{self.prog} --help`.")])
