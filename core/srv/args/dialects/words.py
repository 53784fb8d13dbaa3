"""Parse another engine's command line word by word into flags of the dialect (or of `srv`) and their values.

Values remain strings: this module must not know what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from srv.args.config import all_names, find_any_argument, normalize_name
from srv.args.dialects.table import Dialect, DialectRow, normalize_flag
from srv.args.spec import Argument, nearest
from srv.errors import Rejection

TRUE = ("true", "1", "yes", "on", "t", "y")
FALSE = ("false", "0", "no", "off", "f", "n")
_NUMBER = re.compile(r"-[0-9.]")
_SRV_FLAGS = ("--config",)  # flags of `srv` that are not arguments, each with a value


@dataclass(frozen=True, slots=True)
class ParsedFlag:
    """One flag as the user wrote it, and its value as text ("true" or "false" for a switch, a,b,c for a list).

    Exactly one of `row` and `argument` is set: the flag's row in the dialect's table, or the argument of `srv` that it
    names.
    """

    flag: str
    text: str
    row: DialectRow | None = None
    argument: Argument | None = None


@dataclass(slots=True)
class ParsedCommand:
    """The flags of a command line. `passthrough`: words that are left unchanged for `srv`."""

    flags: list[ParsedFlag] = field(default_factory=list)
    passthrough: list[str] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)


def parse_command(dialect: Dialect, words: Sequence[str], source: str) -> ParsedCommand:
    """Parse a whole command line; `source` names it in refusals."""
    return _Parser(dialect, source).read(_without_launcher(dialect, words))


def _without_launcher(dialect: Dialect, words: Sequence[str]) -> list[str]:
    for launcher in dialect.launchers:
        if tuple(words[: len(launcher)]) == launcher:
            return list(words[len(launcher) :])
    return list(words)


def is_flag(word: str) -> bool:
    """Whether a word is a flag: it begins with a hyphen and is not a number."""
    return len(word) > 1 and word[0] == "-" and not _NUMBER.match(word)


class _Parser:
    """Parses the words in one pass, from left to right."""

    def __init__(self, dialect: Dialect, source: str) -> None:
        self._dialect, self._source = dialect, source
        self._rows = dialect.by_flag
        self._command = ParsedCommand()
        self._remaining: list[str] = []

    def read(self, words: Sequence[str]) -> ParsedCommand:
        self._remaining = list(reversed(words))
        positional = self._dialect.positional
        while self._remaining:
            word = self._remaining.pop()
            if is_flag(word):
                self._read_flag(word)
            elif positional and all(flag.flag != positional for flag in self._command.flags):
                row = self._rows[normalize_flag(positional)]
                self._command.flags.append(ParsedFlag(positional, word, row))
            else:
                self._refuse("unexpected_word", word, "it is not the value of any flag", "Put a flag before it.")
        return self._command

    def _read_flag(self, word: str) -> None:
        flag, equals, value = word.partition("=")
        inline = value if equals else None
        if flag in _SRV_FLAGS and normalize_flag(flag) not in self._rows:
            text = self._one_value(flag, inline)
            self._command.passthrough += [] if text is None else [flag, text]
        elif (dialect_flag := self._find_row(flag)) is not None:
            row, negated, attached_value = dialect_flag
            text = self._value(flag, row.takes, negated, attached_value or inline)
            if text is not None:
                self._command.flags.append(ParsedFlag(flag if attached_value is None else flag[:2], text, row))
        elif (srv_flag := self._find_srv_argument(flag)) is not None:
            argument, negated = srv_flag
            takes = "list" if argument.kind.many else "switch" if argument.kind.base is bool else "value"
            text = self._value(flag, takes, negated, inline, argument.arg.const)
            if text is not None:
                self._command.flags.append(ParsedFlag(flag, text, argument=argument))
        else:
            self._refuse_unknown(flag)
            if inline is None:  # skip its values
                self._all_values()

    def _find_row(self, flag: str) -> tuple[DialectRow, bool, str | None] | None:
        """The row of a flag, whether the flag is its negation, and a value that follows without a space (-O3)."""
        if (row := self._rows.get(normalize_flag(flag))) is not None:
            return row, False, None
        if normalize_flag(flag).startswith("--no-"):
            row = self._rows.get("--" + normalize_flag(flag).removeprefix("--no-"))
            return (row, True, None) if row is not None and row.takes == "switch" else None
        if flag[1:2].isupper() and (row := self._rows.get(flag[:2])) is not None:
            return row, False, flag[2:]
        return None

    def _find_srv_argument(self, flag: str) -> tuple[Argument, bool] | None:
        """An argument of `srv` that a flag names, and whether the flag is its negation."""
        if not flag.startswith("--"):
            return None
        if (argument := find_any_argument(flag)) is not None:
            return argument, False
        argument = find_any_argument("--" + flag.removeprefix("--no-")) if flag.startswith("--no-") else None
        return (argument, True) if argument is not None and argument.kind.base is bool else None

    def _value(self, flag: str, takes: str, negated: bool, inline: str | None, const: str | None = None) -> str | None:
        """The value of a flag; None, with a rejection, if it is missing or invalid. `inline`: the one after "="."""
        if takes == "list":
            return self._list(flag, inline)
        if takes == "value" and inline is None and const is not None and not self._next_is_value():
            return const
        if takes == "value":
            return self._one_value(flag, inline)
        text = inline
        if text is None and self._remaining and self._remaining[-1].lower() in TRUE + FALSE:
            text = self._remaining.pop()
        if text is not None and text.lower() not in TRUE + FALSE:
            self._refuse("bad_value", flag, "it is neither true nor false", "Write true or false after it.", text)
            return None
        return "true" if (text is None or text.lower() in TRUE) != negated else "false"

    def _list(self, flag: str, inline: str | None) -> str | None:
        values = [inline] if inline is not None else self._all_values()
        if not values:
            return self._missing(flag)
        return ",".join(values)

    def _one_value(self, flag: str, inline: str | None) -> str | None:
        if inline is not None:
            return inline
        return self._remaining.pop() if self._next_is_value() else self._missing(flag)

    def _missing(self, flag: str) -> str | None:
        self._refuse("missing_value", flag, "no value follows it", "Write its value after it, or leave it out.")
        return None

    def _next_is_value(self) -> bool:
        return bool(self._remaining) and not is_flag(self._remaining[-1])

    def _all_values(self) -> list[str]:
        values = []
        while self._next_is_value():
            values.append(self._remaining.pop())
        return values

    def _refuse_unknown(self, flag: str) -> None:
        remedy = f"`srv args translate --from {self._dialect.name} --table` lists the known flags."
        if closest := self._nearest(flag):
            remedy = f"Did you mean {closest}?"
        self._refuse("unknown_flag", flag, f"it is not a known flag of {self._dialect.engine} or srv", remedy)

    def _nearest(self, flag: str) -> str | None:
        spellings: Iterable[str] = [name for name in self._rows if name.startswith("--")]
        if self._dialect.ours:
            spellings = [*spellings, *("--" + name.replace("_", "-") for name in all_names())]
        stems = {name.removeprefix("--"): name for name in spellings}
        closest = nearest(normalize_name(flag.lower()).replace("_", "-").lstrip("-"), stems, cutoff=0.6)
        return stems[closest] if closest else None

    def _refuse(self, code: str, what: str, reason: str, remedy: str, value: str | None = None) -> None:
        shown = None if value is None else short(value)
        self._command.rejections.append(Rejection(code, short(what), shown, self._source, reason, remedy))


def short(text: str) -> str:
    """A text as one printable line of at most 60 characters, for refusals and notes."""
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return printable if len(printable) <= 60 else printable[:57] + "..."
