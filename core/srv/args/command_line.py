"""Reading what a command line says of server arguments: texts in, statements and refusals out.

Every wrong value is refused at once and in one style, that of the declarations. Knows no parser: flags have become
entries of a namespace by then.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from srv.args.cli import PREFIX, Given
from srv.args.config import ARGUMENTS, DEPRECATED, all_names, find_any
from srv.args.parser import SOURCE
from srv.args.spec import Argument, nearest
from srv.args.statement import Origin, UserStatement
from srv.errors import Rejected

if TYPE_CHECKING:
    from srv.args.dialects import Translation


def read_command_line(namespace: argparse.Namespace) -> tuple[list[UserStatement], list[Rejected]]:
    """What the user said on the command line, and what of it cannot be read."""
    statements: list[UserStatement] = []
    rejections: list[Rejected] = []
    for key, given in vars(namespace).items():
        if not key.startswith(PREFIX):
            continue
        argument = find_any(key.removeprefix(PREFIX))
        assert argument is not None  # `add_arguments` made no other
        texts = dict.fromkeys(each.text for each in given)
        if len(texts) > 1:
            rejections.append(_said_twice(argument.name, list(texts), argument.arg.secret))
            continue
        name, source = _place(argument, given[-1])
        read = read_text(argument, next(iter(texts)), Origin.COMMAND_LINE, source, name)
        if isinstance(read, Rejected):
            rejections.append(read)
        else:
            statements.append(read)
    return statements, rejections


def _place(argument: Argument, given: Given) -> tuple[str, str]:
    """The name that a flag uses, and where it was said. The flag is told unless it has the argument's own name, or is
    deprecated, in which case `srv.args.deprecated` tells it.
    """
    name = given.flag.removeprefix("--").replace("-", "_")
    if name not in argument.names:
        name = name.removeprefix("no_")
    own = name == argument.name or name in argument.old_names or argument.name in DEPRECATED
    return name, SOURCE if own else f"{SOURCE} with {given.flag}"


def read_config(namespace: argparse.Namespace) -> tuple[str | None, list[Rejected]]:
    """The file that `--config` names, and the refusal of a second one."""
    files = list(dict.fromkeys(getattr(namespace, "config", ())))
    if len(files) > 1:
        return None, [_said_twice("config", files, False)]
    return (files[0] if files else None), []


def _said_twice(name: str, texts: Sequence[str], secret: bool) -> Rejected:
    shown = "two different values" if secret else " and ".join(_short(text) for text in texts)
    return Rejected("said_twice", name, None, SOURCE, f"it is given as {shown}", "Give it once.")


def read_translation(translation: Translation) -> tuple[list[UserStatement], list[Rejected]]:
    """What a command line in another engine's words says, each value by that engine's flag, and what is refused."""
    statements: list[UserStatement] = []
    rejections: list[Rejected] = list(translation.rejections)
    for setting in translation.settings:
        source = f"{setting.said} ({translation.dialect})"
        read = read_text(ARGUMENTS[setting.argument], setting.text, Origin.COMMAND_LINE, source)
        if isinstance(read, Rejected):
            rejections.append(read)
        else:
            statements.append(read)
    return statements, rejections


def read_text(argument: Argument, text: str, origin: Origin, source: str, name: str = "") -> UserStatement | Rejected:
    """A statement read from a text, or the refusal of it. `name`: the name of the argument that was used."""
    try:
        return UserStatement(argument.name, argument.parse(text), origin, source, "" if name == argument.name else name)
    except ValueError as error:
        return bad_value(argument, text, source, f"it {error}")


def bad_value(argument: Argument, value: object, source: str, reason: str) -> Rejected:
    """The refusal of a value that has the wrong type."""
    shown = argument.show("") if argument.arg.secret else _short(value)
    wants = f"{argument.kind.wanted}{', ' + argument.wants if argument.wants and not argument.choices else ''}"
    return Rejected("bad_value", argument.name, shown, source, reason, f"Give {wants}.")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return printable if len(printable) <= 60 else printable[:57] + "..."


def unknown_flags(extras: Sequence[str]) -> list[Rejected]:
    """A refusal for everything that no flag claimed, naming the flag most like it."""
    rejections: list[Rejected] = []
    after_unknown_flag = False
    for extra in extras:
        if not extra.startswith("-"):
            if not after_unknown_flag:
                rejections.append(_unknown("unexpected_word", extra, "no flag takes it", "Put a flag before it."))
            after_unknown_flag = False
            continue
        flag = extra.split("=", 1)[0]
        near = nearest(flag.lstrip("-").replace("-", "_").lower(), (*all_names(), "config"))
        remedy = f"Did you mean --{near.replace('_', '-')}?" if near else "`srv args list` shows all arguments."
        rejections.append(_unknown("unknown_flag", flag, "there is no such flag", remedy))
        after_unknown_flag = "=" not in extra
    return rejections


def _unknown(code: str, word: str, reason: str, remedy: str) -> Rejected:
    return Rejected(code, _short(word), None, SOURCE, reason, remedy)
