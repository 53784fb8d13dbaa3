"""argparse with our manners. Knows no argument: `srv.args.cli` and the commands fill it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from srv.errors import Refusal, Rejected

SOURCE = "command line"


class Parser(argparse.ArgumentParser):
    """argparse with our manners: no abbreviated flags, and errors are refusals.

    What `fill` adds is added when the parser is first used: a command line uses one subcommand, and the flags of the
    others would cost time for nothing.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        named["allow_abbrev"] = False
        self._fill: list[Callable[[], None]] = []
        super().__init__(*positional, **named)

    def fill(self, add: Callable[[], None]) -> None:
        """Let `add` add arguments to this parser before it is first used."""
        self._fill.append(add)

    def complete(self) -> None:
        """Add what was put off."""
        while self._fill:
            self._fill.pop(0)()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; called for the program's words and, by argparse, for a subcommand's."""
        self.complete()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        self.complete()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise Refusal([Rejected("bad_command_line", self.prog, None, SOURCE, message, f"See `{self.prog} --help`.")])
