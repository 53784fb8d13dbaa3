"""Parse the server arguments of a command line: strings in, statements and rejections out.

All invalid values are collected, and all are reported in the same style. This module must not know the parser: it
reads the namespace that argparse has filled.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from srv.args.cli import PREFIX, FlagOccurrence
from srv.args.config import DEPRECATED, all_names, argument_named, find_any_argument
from srv.args.parser import SOURCE
from srv.args.spec import Argument, nearest
from srv.args.statement import Origin, UserStatement
from srv.errors import Rejection

if TYPE_CHECKING:
    from srv.args.dialects import Translation


def read_command_line(namespace: argparse.Namespace) -> tuple[list[UserStatement], list[Rejection]]:
    """The user's statements on the command line, and rejections of invalid values."""
    statements: list[UserStatement] = []
    rejections: list[Rejection] = []
    for key, occurrences in vars(namespace).items():
        if not key.startswith(PREFIX):
            continue
        argument = find_any_argument(key.removeprefix(PREFIX))
        assert argument is not None  # `add_arguments` adds no other entry with this prefix
        texts = dict.fromkeys(occurrence.text for occurrence in occurrences)
        if len(texts) > 1:
            rejections.append(_conflicting_values(argument.name, list(texts), argument.arg.secret))
            continue
        name, source = _name_and_source(argument, occurrences[-1])
        read = read_text(argument, next(iter(texts)), Origin.COMMAND_LINE, source, name)
        if isinstance(read, Rejection):
            rejections.append(read)
        else:
            statements.append(read)
    return statements, rejections


def _name_and_source(argument: Argument, occurrence: FlagOccurrence) -> tuple[str, str]:
    """The argument name that a flag spells, and the source of its value for messages.

    The source names the flag only if it is an alias. For former names and deprecated switches `srv.args.deprecated`
    makes a note that names the flag.
    """
    name = occurrence.flag.removeprefix("--").replace("-", "_")
    if name not in argument.names:
        name = name.removeprefix("no_")
    own = name == argument.name or name in argument.old_names or argument.name in DEPRECATED
    return name, SOURCE if own else f"{SOURCE} with {occurrence.flag}"


def read_config(namespace: argparse.Namespace) -> tuple[str | None, list[Rejection]]:
    """The file that `--config` names, or a rejection if two different files are named."""
    files = list(dict.fromkeys(getattr(namespace, "config", ())))
    if len(files) > 1:
        return None, [_conflicting_values("config", files, False)]
    return (files[0] if files else None), []


def _conflicting_values(name: str, texts: Sequence[str], secret: bool) -> Rejection:
    shown = "two different values" if secret else " and ".join(_short(text) for text in texts)
    return Rejection("said_twice", name, None, SOURCE, f"it is set to {shown}", "Set it once.")


def read_translation(translation: Translation) -> tuple[list[UserStatement], list[Rejection]]:
    """The statements of a translated command line, whose sources name the other engine's flags, and its rejections."""
    statements: list[UserStatement] = []
    rejections: list[Rejection] = list(translation.rejections)
    for setting in translation.settings:
        source = f"{setting.original} ({translation.dialect})"
        read = read_text(argument_named(setting.argument), setting.text, Origin.COMMAND_LINE, source)
        if isinstance(read, Rejection):
            rejections.append(read)
        else:
            statements.append(read)
    return statements, rejections


def read_text(argument: Argument, text: str, origin: Origin, source: str, name: str = "") -> UserStatement | Rejection:
    """Parse a string into a statement, or a rejection. `name`: the name by which the user set the argument."""
    try:
        return UserStatement(argument.name, argument.parse(text), origin, source, "" if name == argument.name else name)
    except ValueError as error:
        return bad_value(argument, text, source, f"it {error}")


def bad_value(argument: Argument, value: object, source: str, reason: str) -> Rejection:
    """The rejection of an invalid value."""
    shown = argument.show("") if argument.arg.secret else _short(value)
    check = f", {argument.expected}" if argument.expected and not argument.choices else ""
    return Rejection("bad_value", argument.name, shown, source, reason, f"Set it to {argument.kind.expected}{check}.")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return printable if len(printable) <= 60 else printable[:57] + "..."


def unknown_flags(extras: Sequence[str]) -> list[Rejection]:
    """Rejections of arguments that argparse did not recognise; each names the most similar flag."""
    rejections: list[Rejection] = []
    after_unknown_flag = False
    for extra in extras:
        if not extra.startswith("-"):
            if not after_unknown_flag:
                reason = "it is not the value of any flag"
                rejections.append(_unknown_rejection("unexpected_word", extra, reason, "Put a flag before it."))
            after_unknown_flag = False
            continue
        flag = extra.split("=", 1)[0]
        closest = nearest(flag.lstrip("-").replace("-", "_").lower(), (*all_names(), "config"))
        remedy = f"Did you mean --{closest.replace('_', '-')}?" if closest else "`srv args list` shows all arguments."
        rejections.append(_unknown_rejection("unknown_flag", flag, "there is no such flag", remedy))
        after_unknown_flag = "=" not in extra
    return rejections


def _unknown_rejection(code: str, text: str, reason: str, remedy: str) -> Rejection:
    return Rejection(code, _short(text), None, SOURCE, reason, remedy)
