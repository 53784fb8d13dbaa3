"""`srv`: runs the subcommand named, and turns our errors into text and exit status.

Exit status: 0 done, 1 a bug of ours, 2 something the operator can put right, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import srv
from srv.args.cli import Parser, unknown_flags
from srv.args.spec import nearest
from srv.errors import InternalError, Refusal, Rejected, SrvError

COMMANDS = ("launch", "plan", "args", "platforms")  # modules of this package, in the order of the help
OPERATOR, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own by default) and return its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run(words)
    except InternalError:
        raise
    except SrvError as error:
        sys.stderr.write(error_text(error))
        return OPERATOR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone (`srv args list | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    parser = build_parser()
    _refuse_unknown_command(words)
    namespace, unknown = parser.parse_known_args(words)
    if getattr(namespace, "handler", None) is None:
        parser.print_help()
        return 0
    namespace.unknown = unknown
    if unknown and not getattr(namespace, "takes_server_arguments", False):
        raise Refusal(unknown_flags(unknown))
    return int(namespace.handler(namespace))


def build_parser() -> Parser:
    """The parser of `srv` with every subcommand."""
    parser = Parser(prog="srv", description="A hardware-neutral server for large language models.")
    parser.add_argument("--version", action="version", version=f"srv {srv.__version__}")
    subparsers: argparse._SubParsersAction[Parser] = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"srv.cli.{name}").add(subparsers)
    return parser


def _refuse_unknown_command(words: Sequence[str]) -> None:
    """argparse would list the choices; we name the nearest."""
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = nearest(words[0], COMMANDS)
        remedy = f"Did you mean {near}?" if near else f"There are: {', '.join(COMMANDS)}."
        raise Refusal(
            [Rejected("unknown_command", repr(words[0]), None, "command line", "there is no such command", remedy)]
        )


def error_text(error: SrvError) -> str:
    """What the operator reads: one line, or a line a refusal below a count."""
    if isinstance(error, Refusal):
        count = len(error.rejections)
        head = f"srv: {count} refusal{'s' if count != 1 else ''}:\n"
        return head + "".join(f"  - {rejected}\n" for rejected in error.rejections)
    return f"srv: {error}\n"
