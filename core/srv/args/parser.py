"""The argparse parser of the command line. It must not know any argument: `srv.args.cli` and the commands add them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any, NoReturn

from srv.errors import Refusal, Rejection

SOURCE = "command line"
HELP = ("-h", "--help", "--help-all")


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated flags, whose errors are raised as `Refusal`, and which can add flags lazily.

    A command line uses one subcommand and few of its flags, and adding hundreds of flags takes noticeable time. So the
    callbacks of `add_lazily` run when the parser is first used, and add only the flags that are on the command line.

    `brief` has what `--help` shows of a flag in place of its help text, which `--help-all` shows.
    """

    def __init__(self, *positional: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        self._lazy: list[Callable[[Set[str] | None], None]] = []
        self.brief: dict[argparse.Action, str] = {}
        super().__init__(*positional, **kwargs)

    def add_lazily(self, add: Callable[[Set[str] | None], None]) -> None:
        """Register a callback that adds flags to this parser before it is first used.

        `add(flags)` may leave out flags that are not in the set; for None it must add all.
        """
        self._lazy.append(add)

    def add_pending(self, flags: Set[str] | None = None) -> None:
        """Run the callbacks of `add_lazily` for the given flags, or for all flags if None."""
        for add in self._lazy:
            add(flags)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, which also calls this on the parser of a subcommand."""
        words = sys.argv[1:] if args is None else list(args)
        flags = {word.partition("=")[0] for word in words}
        self.add_pending(None if flags & set(HELP) else flags)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """What `--help` shows: of the flags in `brief`, that text instead of their own."""
        self.add_pending()
        whole = [(action, action.help) for action in self.brief]
        try:
            for action, text in self.brief.items():
                action.help = text
            return super().format_help()
        finally:
            for action, help_text in whole:
                action.help = help_text

    def format_whole_help(self) -> str:
        """What `--help-all` shows."""
        self.add_pending()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise Refusal([Rejection("bad_command_line", self.prog, None, SOURCE, message, f"See `{self.prog} --help`.")])


class HelpAll(argparse.Action):
    """Prints the help with everything that `--help` leaves out, and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.write(parser.format_whole_help() if isinstance(parser, Parser) else parser.format_help())
        parser.exit()
