"""The command line of server arguments, made from their declarations.

argparse finds flags and texts; reading the texts is left to the declarations, so that every wrong value is
refused at once and in one style. Unset is absence: a flag that was not given is not in the namespace.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from srv.args.config import ARGUMENTS, DEPRECATED, GROUPS, all_names, find_any
from srv.args.spec import Argument, nearest
from srv.args.statement import Origin, UserStatement
from srv.errors import Refusal, Rejected

SOURCE = "command line"
_TITLES = {
    "model": "model and tokenizer",
    "weights": "weights and quantization",
    "platform": "platform and backends",
    "memory": "memory",
    "cache": "tiers of the prefix cache",
    "schedule": "scheduling",
    "server": "HTTP server",
    "observe": "logs, metrics, traces",
    "parallel": "parallelism",
    "experts": "mixture of experts",
    "speculative": "speculative decoding",
    "lora": "LoRA adapters",
    "graphs": "graphs, compilation, kernels",
    "disaggregation": "prefill and decode on separate servers",
    "debug": "debugging",
}
_PREFIX = "argument:"  # of namespace entries, apart from a subcommand's own options


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and a flag for every argument, in a help section for each group."""
    parser.set_defaults(takes_server_arguments=True)
    parser.usage = f"{parser.prog} [FLAG ...]"
    if isinstance(parser, Parser):
        parser.fill(lambda: _add_all(parser))
    else:
        _add_all(parser)


def _add_all(parser: argparse.ArgumentParser) -> None:
    config = parser.add_argument_group("configuration file")
    config.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of arguments by name; the command line and SRV_ variables go before it",
    )
    sections = {group: parser.add_argument_group(_TITLES.get(group, group)) for group in GROUPS}
    for argument in ARGUMENTS.values():
        _add_flag(sections[argument.group], argument)
    outdated = parser.add_argument_group("deprecated")
    for switch in DEPRECATED.values():
        _add_flag(outdated, switch)


def _add_flag(section: argparse._ArgumentGroup, argument: Argument) -> None:
    help_text = help_line(argument).replace("%", "%%")
    flags = [flag for name, flag in zip(argument.names, argument.flags, strict=True) if name not in argument.old_names]
    _add_names(section, argument, argument.name, flags, help_text)
    for name in argument.old_names:  # apart from the others, so that a note can be given
        _add_names(section, argument, name, ["--" + name.replace("_", "-")], argparse.SUPPRESS)


def _add_names(
    section: argparse._ArgumentGroup, argument: Argument, name: str, flags: Sequence[str], help_text: str
) -> None:
    target: dict[str, Any] = {"dest": _PREFIX + name, "default": argparse.SUPPRESS, "help": help_text}
    if argument.kind.base is bool and not argument.kind.many:
        section.add_argument(*flags, action="store_const", const="true", **target)
        if not argument.name.startswith("disable_"):
            negations = ["--no-" + flag.removeprefix("--") for flag in flags]
            target["help"] = argparse.SUPPRESS
            section.add_argument(*negations, action="store_const", const="false", **target)
    elif argument.kind.many:
        section.add_argument(*flags, nargs="+", metavar=metavar(argument), **target)
    elif argument.arg.bare is not None:
        section.add_argument(*flags, nargs="?", const=argument.arg.bare, metavar=metavar(argument), **target)
    else:
        section.add_argument(*flags, metavar=metavar(argument), **target)


def metavar(argument: Argument) -> str:
    """What help prints for the value."""
    if argument.kind.choices:
        return "{" + ",".join(argument.kind.choices) + "}"
    return argument.arg.metavar or (argument.arg.unit or argument.kind.base.__name__).upper()


def help_line(argument: Argument) -> str:
    """The declaration's sentence, its law, its default, and whether it is planned."""
    line = argument.arg.help
    if argument.wants and argument.kind.base in (int, float):
        line += f" Must be {argument.wants}."
    if argument.default is not None and argument.kind.base is not bool:
        line += f" (default: {argument.show(argument.default)})"
    if argument.arg.planned_values:
        line += f" [planned: {', '.join(value for value, _ in argument.arg.planned_values)}]"
    if argument.deprecated:
        line += f" [deprecated: {argument.deprecated}]"
    return line + (f" [planned: {argument.arg.planned}]" if argument.arg.planned else "")


def read_command_line(namespace: argparse.Namespace) -> tuple[list[UserStatement], list[Rejected]]:
    """What the user said on the command line, and what of it cannot be read."""
    statements: list[UserStatement] = []
    rejections: list[Rejected] = []
    for key, text in vars(namespace).items():
        if not key.startswith(_PREFIX) or text is None:
            continue
        name = key.removeprefix(_PREFIX)
        argument = find_any(name)
        assert argument is not None  # `add_arguments` made no other
        joined = ",".join(text) if isinstance(text, list) else text
        read = read_text(argument, joined, Origin.COMMAND_LINE, SOURCE, name)
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
    wants = f"{argument.kind.name}{', ' + argument.wants if argument.wants and not argument.choices else ''}"
    return Rejected("bad_value", argument.name, shown, source, reason, f"Give {wants}.")


def _short(value: object) -> str:
    text = str(value) if isinstance(value, (bool, int, float, str)) else repr(value)
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
