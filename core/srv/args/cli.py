"""The flags of server arguments, made from their declarations.

argparse finds flags and texts; reading the texts is left to the declarations (`srv.args.command_line`). Unset is
absence: a flag that was not given is not in the namespace. One that was is there with the word and the text of each
time, so that two different texts can be refused, and messages can name the flag that was used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from srv.args.config import ARGUMENTS, DEPRECATED, GROUPS
from srv.args.parser import Parser
from srv.args.spec import Argument

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
PREFIX = "argument:"  # of namespace entries, apart from a subcommand's own options


class Given(NamedTuple):
    """A flag as it was written, by any of its names, and its value; several values are joined by commas."""

    flag: str
    text: str


class Take(argparse.Action):
    """Adds a flag to those of its argument that were given before. `const`: what it says if it takes no value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        text = self.const if self.nargs == 0 else ",".join(values) if isinstance(values, list) else values
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), Given(option_string or "", text)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and a flag for every argument, in a help section for each group."""
    parser.set_defaults(takes_server_arguments=True)
    parser.usage = f"{parser.prog} [FLAG ...]"
    flags = _Flags(parser)
    if isinstance(parser, Parser):
        parser.fill(flags.add)
    else:
        flags.add(None)


class _Flags:
    """The flags of one parser. Those that a command line does not say are never made."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._sections: dict[str, argparse._ArgumentGroup] = {}
        self._waiting = {argument.name: argument for argument in (*ARGUMENTS.values(), *DEPRECATED.values())}

    def add(self, words: Set[str] | None) -> None:
        """Add the flags that are among the words and not there yet; None: all of them."""
        if not self._sections:
            self._begin()
        for argument in tuple(self._waiting.values()):
            if words is None or not words.isdisjoint(_spellings(argument)):
                del self._waiting[argument.name]
                _add_flag(self._sections["deprecated" if argument.deprecated else argument.group], argument)

    def _begin(self) -> None:
        config = self._parser.add_argument_group("configuration file")
        config.add_argument(
            "--config",
            action="append",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="YAML file of arguments by name; the command line and SRV_ variables go before it",
        )
        for group in (*GROUPS, "deprecated"):
            self._sections[group] = self._parser.add_argument_group(_TITLES.get(group, group))


def _spellings(argument: Argument) -> list[str]:
    """Every word that argparse would take for this argument's flag."""
    return [*argument.flags, *("--no-" + flag.removeprefix("--") for flag in argument.flags)]


def _add_flag(section: argparse._ArgumentGroup, argument: Argument) -> None:
    help_text = help_line(argument).replace("%", "%%")
    flags = [flag for name, flag in zip(argument.names, argument.flags, strict=True) if name not in argument.old_names]
    _add_names(section, argument, argument.name, flags, help_text)
    for name in argument.old_names:  # apart from the others, so that a note can be given
        _add_names(section, argument, name, ["--" + name.replace("_", "-")], argparse.SUPPRESS)


def _add_names(
    section: argparse._ArgumentGroup, argument: Argument, name: str, flags: Sequence[str], help_text: str
) -> None:
    target: dict[str, Any] = {
        "dest": PREFIX + name,
        "default": argparse.SUPPRESS,
        "help": help_text,
        "action": Take,
    }
    if argument.kind.base is bool and not argument.kind.many:
        section.add_argument(*flags, nargs=0, const="true", **target)
        negations = ["--no-" + flag.removeprefix("--") for flag in flags]
        target["help"] = argparse.SUPPRESS
        section.add_argument(*negations, nargs=0, const="false", **target)
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
