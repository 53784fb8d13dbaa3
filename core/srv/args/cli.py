"""The command-line flags of server arguments, generated from their declarations.

argparse only collects flags and their values as strings; `srv.args.command_line` parses the values by the declarations.
A flag that was not given is absent from the namespace. For a flag that was given, the namespace holds every occurrence
with its spelling and its value, so that contradictory values can be refused and messages can name the flag as written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from srv.args.config import ARGUMENTS, DEPRECATED, GROUPS, plugin_arguments
from srv.args.parser import HelpAll, Parser
from srv.args.spec import Argument

_TITLES = {
    "model": "model and tokenizer",
    "weights": "weights and quantization",
    "platform": "platform and backends",
    "memory": "memory",
    "cache": "prefix cache tiers",
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
PREFIX = "argument:"  # prefix of namespace entries; a subcommand's own options do not have it


class FlagOccurrence(NamedTuple):
    """A flag as the user spelled it, and its value; several values are joined by commas."""

    flag: str
    text: str


class StoreFlag(argparse.Action):
    """Appends an occurrence of a flag to the earlier occurrences. `const` is the value of a flag that takes none."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        text = self.const if self.nargs == 0 else ",".join(values) if isinstance(values, list) else values
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), FlagOccurrence(option_string or "", text)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and a flag for every argument, with one help section per group."""
    parser.set_defaults(takes_server_arguments=True)
    parser.usage = f"{parser.prog} [FLAG ...]"
    parser.add_argument("--help-all", action=HelpAll, help="as --help, with what is planned or deprecated")
    flags = _Flags(parser)
    if isinstance(parser, Parser):
        parser.add_lazily(flags.add)
    else:
        flags.add(None)


class _Flags:
    """The flags of one parser. Flags that are not on the command line are never added."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._sections: dict[str, argparse._ArgumentGroup] = {}
        self._added: set[str] = set()  # arguments of plugins
        self._pending = {argument.name: argument for argument in (*ARGUMENTS.values(), *DEPRECATED.values())}

    def add(self, flags: Set[str] | None) -> None:
        """Add those of the given flags that have not been added yet; all flags if None."""
        if not self._sections:
            self._add_sections()
        for argument in (*self._pending.values(), *self._of_plugins(flags)):
            if flags is None or not flags.isdisjoint(_spellings(argument)):
                self._pending.pop(argument.name, None)
                self._add_flag(argument)

    def _of_plugins(self, flags: Set[str] | None) -> list[Argument]:
        """The arguments of plugins that have not been added yet."""
        arguments = [argument for argument in plugin_arguments().values() if argument.name not in self._added]
        chosen = [argument for argument in arguments if flags is None or not flags.isdisjoint(_spellings(argument))]
        self._added.update(argument.name for argument in chosen)
        return chosen

    def _add_flag(self, argument: Argument) -> None:
        """Add its flags; `--help` shows those that work, without the values that do not."""
        section = self._section("deprecated" if argument.deprecated else argument.group)
        shown = _add_flag(section, argument)
        if isinstance(self._parser, Parser):
            works = not argument.deprecated and not argument.arg.planned
            self._parser.brief[shown] = _escaped(what_works(argument)) if works else argparse.SUPPRESS

    def _section(self, group: str) -> argparse._ArgumentGroup:
        if group not in self._sections:
            self._sections[group] = self._parser.add_argument_group(group)
        return self._sections[group]

    def _add_sections(self) -> None:
        config = self._parser.add_argument_group("configuration file")
        config.add_argument(
            "--config",
            action="append",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="YAML file of arguments by name; the command line and SRV_ variables take precedence over it",
        )
        for group in (*GROUPS, "deprecated"):
            self._sections[group] = self._parser.add_argument_group(_TITLES.get(group, group))


def _spellings(argument: Argument) -> list[str]:
    """Every spelling that argparse accepts for this argument's flag."""
    return [*argument.flags, *("--no-" + flag.removeprefix("--") for flag in argument.flags)]


def _add_flag(section: argparse._ArgumentGroup, argument: Argument) -> argparse.Action:
    """Add the flags of an argument to a section of the help; returns the action that the help shows."""
    help_text = _escaped(help_line(argument))
    flags = [flag for name, flag in zip(argument.names, argument.flags, strict=True) if name not in argument.old_names]
    shown = _add_names(section, argument, argument.name, flags, help_text)
    for name in argument.old_names:  # separately and hidden from the help; their use logs a note
        _add_names(section, argument, name, ["--" + name.replace("_", "-")], argparse.SUPPRESS)
    return shown


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _add_names(
    section: argparse._ArgumentGroup, argument: Argument, name: str, flags: Sequence[str], help_text: str
) -> argparse.Action:
    options: dict[str, Any] = {
        "dest": PREFIX + name,
        "default": argparse.SUPPRESS,
        "help": help_text,
        "action": StoreFlag,
    }
    if argument.kind.base is bool and not argument.kind.many:
        shown = section.add_argument(*flags, nargs=0, const="true", **options)
        negations = ["--no-" + flag.removeprefix("--") for flag in flags]
        options["help"] = argparse.SUPPRESS
        section.add_argument(*negations, nargs=0, const="false", **options)
        return shown
    if argument.kind.many:
        return section.add_argument(*flags, nargs="+", metavar=metavar(argument), **options)
    if argument.arg.const is not None:
        return section.add_argument(*flags, nargs="?", const=argument.arg.const, metavar=metavar(argument), **options)
    return section.add_argument(*flags, metavar=metavar(argument), **options)


def metavar(argument: Argument) -> str:
    """The placeholder of the value in help texts."""
    if argument.implemented_choices:
        return "{" + ",".join(argument.implemented_choices) + "}"
    return argument.arg.metavar or (argument.arg.unit or argument.kind.base.__name__).upper()


def what_works(argument: Argument) -> str:
    """The sentence of an argument, its check and its default."""
    line = argument.arg.help
    if argument.expected and argument.kind.base in (int, float):
        line += f" Must be {argument.expected}."
    if argument.default is not None and argument.kind.base is not bool:
        line += f" (default: {argument.show(argument.default)})"
    return line


def help_line(argument: Argument) -> str:
    """The whole help text of an argument: what works, and what is planned or deprecated."""
    line = what_works(argument)
    if argument.arg.planned_values:
        line += f" [planned: {', '.join(value for value, _ in argument.arg.planned_values)}]"
    if argument.deprecated:
        line += f" [deprecated: {argument.deprecated}]"
    return line + (f" [planned: {argument.arg.planned}]" if argument.arg.planned else "")
