"""`srv`: runs the subcommand named, and turns our errors into text and exit status.

A distribution adds a subcommand through the entry-point group `srv.commands`: name = the command, value = a function
that adds it to the subparsers. They are looked for only if the command line names none of core's own.

Exit status: 0 done, 1 a bug of ours, 2 something the operator can put right, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import srv
from srv.args.parser import Parser
from srv.cli.dialect import expand_dialect
from srv.errors import InternalError, PluginError, Refusal, Rejected, SrvError

if TYPE_CHECKING:
    from srv.platform.installed import Entry

# modules of this package, in the order of the help
COMMANDS = ("launch", "plan", "args", "platforms", "doctor", "plugin", "conformance")
COMMAND_GROUP = "srv.commands"
OPERATOR, INTERRUPTED = 2, 130


def console() -> int:
    """`main` as a process of its own, without looking for garbage: a seventh of what `srv plan` takes.

    What a command makes it keeps, until the process ends; one that goes on working turns collection on again.
    """
    gc.disable()
    try:
        return main()
    finally:
        gc.freeze()  # what is left at the end need not be looked at either


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
    words, translation = expand_dialect(words)
    known = bool(words) and words[0] in COMMANDS
    further = () if known else _further_commands()
    _refuse_unknown_command(words, (*COMMANDS, *(each.name for each in further)))
    parser = build_parser(words[:1] if known else COMMANDS, further)
    namespace, unknown = parser.parse_known_args(words)
    if getattr(namespace, "handler", None) is None:
        parser.print_help()
        return 0
    namespace.unknown, namespace.translation = unknown, translation
    if unknown and not getattr(namespace, "takes_server_arguments", False):
        from srv.args.command_line import unknown_flags  # here and below: what is seldom needed is loaded then

        raise Refusal(unknown_flags(unknown))
    return int(namespace.handler(namespace))


def build_parser(commands: Sequence[str] = COMMANDS, further: Sequence[Entry] = ()) -> Parser:
    """The parser of `srv` with these subcommands. What is not run need not be imported."""
    parser = Parser(prog="srv", description="A hardware-neutral server for large language models.")
    parser.add_argument("--version", action="version", version=f"srv {srv.__version__}")
    subparsers: argparse._SubParsersAction[Parser] = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in commands:
        importlib.import_module(f"srv.cli.{name}").add(subparsers)
    for each in further:
        _add_further(each, subparsers)
    return parser


def whole_parser() -> Parser:
    """The parser with every subcommand, those of other distributions too."""
    return build_parser(COMMANDS, _further_commands())


def _further_commands() -> tuple[Entry, ...]:
    """Subcommands that distributions bring; of two of one name, the first. Core's own names are not theirs to take."""
    from srv.platform.installed import entries

    found: dict[str, Entry] = {}
    for each in sorted(entries(COMMAND_GROUP), key=lambda each: (each.name, each.value)):
        if each.name not in COMMANDS:
            found.setdefault(each.name, each)
    return tuple(found.values())


def _add_further(command: Entry, subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Let a distribution add its command; one that cannot is listed as such, and harms no other."""
    try:
        command.load()(subparsers)
    except Exception as error:  # noqa: BLE001 - whatever a distribution does wrong is its own command's fault
        distribution = command.distribution
        reason = f"adding it raised {type(error).__name__}: {error}"
        remedy = f"Reinstall or update {distribution}, or uninstall it"
        fault = PluginError(distribution, f"command {command.name}", reason, remedy)
        parser = subparsers.choices.get(command.name) or subparsers.add_parser(command.name, help="cannot be loaded")
        parser.set_defaults(handler=functools.partial(_refuse_broken, fault), takes_server_arguments=True)


def _refuse_broken(fault: PluginError, namespace: argparse.Namespace) -> NoReturn:
    raise fault


def _refuse_unknown_command(words: Sequence[str], known: Sequence[str]) -> None:
    """argparse would list the choices; we name the nearest."""
    if words and not words[0].startswith("-") and words[0] not in known:
        from srv.args.spec import nearest

        near = nearest(words[0], known)
        remedy = f"Did you mean {near}?" if near else f"There are: {', '.join(known)}."
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
