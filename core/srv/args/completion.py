"""Shell completion scripts, generated from the argparse parser: static text, so that completion does not run `srv`.

This module must not know any argument of `srv`: it completes all flags of all subcommands, except hidden ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from srv.args.parser import Parser

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Option:
    """A flag of a command. `flags`: all its spellings. `choices`: its values, or () if they are unknown."""

    flags: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command, such as "args list", with its subcommands and options."""

    words: tuple[str, ...]
    children: tuple[str, ...]
    options: tuple[Option, ...]


def script(shell: str, parser: argparse.ArgumentParser, values_by_flag: Mapping[str, tuple[str, ...]]) -> str:
    """The script for a shell (one of `SHELLS`). `values_by_flag`: for flags without choices in argparse."""
    commands = tuple(_commands(parser, (), values_by_flag))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...], values_by_flag: Mapping[str, tuple[str, ...]]
) -> Iterator[Command]:
    if isinstance(parser, Parser):
        parser.add_pending()
    children: dict[str, argparse.ArgumentParser] = {}
    options: list[Option] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children.update(action.choices)
        elif action.option_strings and action.help != argparse.SUPPRESS:
            choices = tuple(str(choice) for choice in action.choices or ())
            if not choices:
                choices = next((values_by_flag[flag] for flag in action.option_strings if flag in values_by_flag), ())
            options.append(Option(tuple(action.option_strings), action.nargs != 0, choices, action.help or ""))
    yield Command(words, tuple(children), tuple(options))
    for name, child in children.items():
        yield from _commands(child, (*words, name), values_by_flag)


def _bash(commands: tuple[Command, ...]) -> str:
    """A bash function that finds the command typed so far, and a table of the words that may follow it."""
    word_cases, value_cases = [], []
    for command in commands:
        words = " ".join((*command.children, *(flag for option in command.options for flag in option.flags)))
        word_cases.append(f'        "{" ".join(command.words)}") words="{words}" ;;')
        for option in command.options:
            if option.takes_value:
                pattern = "|".join(f'"{" ".join(command.words)} {flag}"' for flag in option.flags)
                option_words = " ".join(option.choices)
                value_cases.append(f'        {pattern}) words="{option_words}"; value=1 ;;')
    known_commands = "|".join(f'"{" ".join(command.words)}"' for command in commands if command.words)
    return "\n".join(
        [
            "# bash completion for srv; put `source <(srv args completion bash)` into ~/.bashrc",
            "_srv() {",
            '    local word command="" words="" value="" current="${COMP_WORDS[COMP_CWORD]}" before=""',
            '    [ "$COMP_CWORD" -gt 0 ] && before="${COMP_WORDS[COMP_CWORD-1]}"',
            '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
            '        case "${command:+$command }$word" in',
            f'        {known_commands}) command="${{command:+$command }}$word" ;;',
            "        esac",
            "    done",
            '    case "$command $before" in',
            *value_cases,
            "    esac",
            '    if [ -z "$value" ]; then',
            '        case "$command" in',
            *word_cases,
            "        esac",
            "    fi",
            '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
            '    if [ -n "$value" ] && [ -z "$words" ]; then COMPREPLY=($(compgen -f -- "$current")); fi',
            "}",
            "complete -F _srv srv",
            "",
        ]
    )


def _zsh(commands: tuple[Command, ...]) -> str:
    """One zsh function per command; the function of a command calls those of its subcommands."""
    lines = ["#compdef srv", "# zsh completion for srv; write it to a file _srv in a folder of $fpath"]
    for command in commands:
        lines += ["", f"{_zsh_name(command.words)}() {{", "    local -a options", "    options=("]
        lines += [f"        {spec}" for option in command.options for spec in _zsh_specs(option)]
        lines.append("    )")
        if command.children:
            subcommands = " ".join(command.children)
            depth = len(command.words) + 2
            lines += [
                f"    if (( CURRENT > {depth} )); then",
                f'        case "$words[{depth}]" in',
                *(f"        {name}) {_zsh_name((*command.words, name))}; return ;;" for name in command.children),
                "        esac",
                "    fi",
                f'    _arguments $options "*:command:({subcommands})"',
            ]
        else:
            lines.append("    _arguments $options")
        lines.append("}")
    return "\n".join([*lines, "", "compdef _srv srv", ""])


def _zsh_name(words: tuple[str, ...]) -> str:
    return "_".join(("_srv", *words)).replace("-", "_")


def _zsh_specs(option: Option) -> Iterator[str]:
    help_text = _summary(option.help).replace("[", "(").replace("]", ")").replace(":", " -")
    for flag in option.flags:
        values = f":value:({' '.join(option.choices)})" if option.choices else ":value:_files"
        yield f"'{flag}[{help_text}]{values if option.takes_value else ''}'"


def _fish(commands: tuple[Command, ...]) -> str:
    """One line per word that may follow a command, with the condition under which it may follow."""
    lines = ["# fish completion for srv; put `srv args completion fish | source` into config.fish"]
    for command in commands:
        conditions = [f"__fish_seen_subcommand_from {word}" for word in command.words]
        if command.children:
            conditions.append(f"not __fish_seen_subcommand_from {' '.join(command.children)}")
        condition = f" -n '{'; and '.join(conditions)}'" if conditions else ""
        lines += [f"complete -c srv -f{condition} -a {child}" for child in command.children]
        for option in command.options:
            names = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            value = f" -x -a '{' '.join(option.choices)}'" if option.choices else " -r" if option.takes_value else ""
            lines.append(f"complete -c srv{condition} {names}{value} -d '{_summary(option.help)}'")
    return "\n".join([*lines, ""])


def _summary(text: str) -> str:
    """The first sentence of a help text, without characters that need escaping within shell quotes."""
    first = text.replace("%%", "%").split(". ")[0].split(" (default:")[0].split(" [planned")[0]
    return "".join("" if character in "'`\\$\"" else character for character in first).rstrip(".")
