"""`srv`: runs a subcommand, and converts our errors into text and an exit status.

A distribution adds a subcommand through the entry-point group `srv.commands`: the name is the command's, and the
value is a function that adds it to the subparsers. The group is read only if the command is not one of core's own.

Exit status: 0 success, 1 a bug in srv, 2 an error that the operator can fix, 130 interrupted.
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
from srv.cli.text import columns, wrapped
from srv.errors import InternalError, PluginError, Refusal, Rejection, SrvError

if TYPE_CHECKING:
    from srv.platform.installed import Entry

# modules of this package, in the order of the help
COMMANDS = ("launch", "plan", "args", "platforms", "doctor", "plugin", "conformance", "contract", "top", "replay")
COMMAND_GROUP = "srv.commands"
OPERATOR_ERROR, INTERRUPTED = 2, 130


def console() -> int:
    """The entry point: `main` without garbage collection, which takes a seventh of the time of `srv plan`.

    Most commands keep their objects until the process ends. A long-running command enables collection again.
    """
    gc.disable()
    try:
        return main()
    finally:
        gc.freeze()  # the collection at interpreter exit skips all remaining objects


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own by default) and return its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run(words)
    except InternalError:
        raise
    except SrvError as error:
        sys.stderr.write(error_text(error, columns(sys.stderr)))
        return OPERATOR_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has exited (`srv args list | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    words, translation = expand_dialect(words)
    is_command = bool(words) and words[0] in COMMANDS
    further = () if is_command else _further_commands()
    _refuse_unknown_command(words, (*COMMANDS, *(entry.name for entry in further)))
    parser = build_parser(words[:1] if is_command else COMMANDS, further)
    namespace, unknown = parser.parse_known_args(words)
    if getattr(namespace, "handler", None) is None:
        parser.print_help()
        return 0
    namespace.unknown, namespace.translation = unknown, translation
    if unknown and not getattr(namespace, "takes_server_arguments", False):
        from srv.args.command_line import unknown_flags  # here and below: rarely needed

        raise Refusal(unknown_flags(unknown))
    return int(namespace.handler(namespace))


def build_parser(commands: Sequence[str] = COMMANDS, further: Sequence[Entry] = ()) -> Parser:
    """The parser of `srv` with these subcommands; the modules of all others are not imported."""
    parser = Parser(prog="srv", description="A hardware-neutral server for large language models.")
    parser.add_argument("--version", action="version", version=f"srv {srv.__version__}")
    subparsers: argparse._SubParsersAction[Parser] = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in commands:
        importlib.import_module(f"srv.cli.{name}").add(subparsers)
    for entry in further:
        _add_further(entry, subparsers)
    return parser


def complete_parser() -> Parser:
    """The parser with all subcommands, including those of other distributions."""
    return build_parser(COMMANDS, _further_commands())


def _further_commands() -> tuple[Entry, ...]:
    """Subcommands of other distributions. The first of a name wins, and core's own names cannot be replaced."""
    from srv.platform.installed import entries

    commands: dict[str, Entry] = {}
    for entry in sorted(entries(COMMAND_GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry.name not in COMMANDS:
            commands.setdefault(entry.name, entry)
    return tuple(commands.values())


def _add_further(command: Entry, subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Let a distribution add its command; if that fails, the command is listed as broken, and the others still work."""
    from srv.platform.registry import check_requirement

    try:
        check_requirement(command)
        command.load()(subparsers)
        return
    except PluginError as error:
        fault = error
    except Exception as error:  # noqa: BLE001 - a distribution may raise anything; only its own command fails
        distribution = command.distribution
        reason = f"adding it raised {type(error).__name__}: {error}"
        remedy = f"Reinstall or update {distribution}, or uninstall it"
        fault = PluginError(distribution, f"command {command.name}", reason, remedy)
    parser = subparsers.choices.get(command.name) or subparsers.add_parser(command.name, help="cannot be loaded")
    parser.set_defaults(handler=functools.partial(_refuse_broken, fault), takes_server_arguments=True)


def _refuse_broken(fault: PluginError, namespace: argparse.Namespace) -> NoReturn:
    raise fault


def _refuse_unknown_command(words: Sequence[str], commands: Sequence[str]) -> None:
    """Refuse an unknown command with the most similar name; argparse would list all choices."""
    if words and not words[0].startswith("-") and words[0] not in commands:
        from srv.args.spec import nearest

        closest = nearest(words[0], commands)
        remedy = f"Did you mean {closest}?" if closest else f"Available commands: {', '.join(commands)}."
        raise Refusal(
            [Rejection("unknown_command", repr(words[0]), None, "command line", "there is no such command", remedy)]
        )


def error_text(error: SrvError, width: int | None = None) -> str:
    """The text for the operator: one line, or the number of refusals and one line for each.

    width: columns of a terminal, which would break the lines in the middle of words and codes; None: do not wrap.
    """
    if isinstance(error, Refusal):
        count = len(error.rejections)
        lines = [f"srv: {count} refusal{'s' if count != 1 else ''}:"]
        lines += [wrapped(f"  - {rejected}", "  ", width) for rejected in error.rejections]
        return "\n".join(lines) + "\n"
    return wrapped(f"srv: {error}", "  ", width) + "\n"
