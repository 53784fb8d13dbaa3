"""From a foreign command line to what `srv` would be told: settings, notes, refusals.

Two flags that say one argument differently are refused together; the same flag twice counts as its engine counts
it: the last one holds. Whether a value is good is not judged here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from srv.args.config import ARGUMENTS, find_argument
from srv.args.dialects.conversions import convert
from srv.args.dialects.given import Converted, Given, Unfit
from srv.args.dialects.table import PLAIN, Dialect, Row, plain, read_dialect
from srv.args.dialects.words import Reading, Said, read_words, short
from srv.args.spec import HIDDEN, Argument
from srv.errors import InternalError, Rejected

MemoryOf = Callable[[str | None], int | None]


@dataclass(frozen=True, slots=True)
class Setting:
    """One argument of `srv`, the text that it is given, and the foreign flag that says so.

    `said`: the flag with its value as the user wrote it, shortened; a secret value is hidden.
    """

    argument: str
    text: str
    flag: str
    said: str

    @property
    def words(self) -> tuple[str, ...]:
        """As a command line says it; nothing for a `disable_` switch that is false, which no flag can say."""
        declared = ARGUMENTS[self.argument]
        if declared.kind.base is bool and not declared.kind.many and self.text in ("true", "false"):
            if self.text == "true":
                return (declared.flag,)
            return () if declared.name.startswith("disable_") else ("--no-" + declared.flag.removeprefix("--"),)
        return (f"{declared.flag}={self.text}",) if self.text.startswith("-") else (declared.flag, self.text)

    @property
    def value(self) -> Any:
        """As a YAML file says it; the text itself if the argument cannot read it."""
        declared = ARGUMENTS[self.argument]
        try:
            return declared.kind.dump(declared.parse(self.text))
        except ValueError:
            return self.text


@dataclass(frozen=True, slots=True)
class Translation:
    """What a foreign command line comes to. `passed`: words that were already those of `srv`."""

    dialect: str
    settings: tuple[Setting, ...]
    passed: tuple[str, ...]
    notes: tuple[str, ...]
    rejections: tuple[Rejected, ...]

    @property
    def words(self) -> list[str]:
        """The command line in the spelling of `srv`, without the command."""
        return [*(word for setting in self.settings for word in setting.words), *self.passed]

    @property
    def command(self) -> str:
        """The command line as a shell takes it."""
        return shlex.join(["srv", "launch", *self.words])

    @property
    def values(self) -> dict[str, Any]:
        """Typed values by argument: what a configuration file would hold."""
        return {setting.argument: setting.value for setting in self.settings}


def translate(dialect: str, words: Sequence[str], memory_of: MemoryOf = lambda device: None) -> Translation:
    """Translate a command line of another engine; Refusal if there is no such dialect.

    `memory_of` gives the bytes of one device by the text of `--device` (None: not given), if it is known. It is
    called only where a size in bytes has to become a fraction.
    """
    table = read_dialect(dialect)
    who = f"command line, as {table.engine}"
    bad = [word for word in words if not _is_text(word)]
    if bad:
        reason, remedy = "it is no valid text", "Write it in UTF-8, without NUL."
        return Translation(
            dialect, (), (), (), tuple(Rejected("bad_text", ascii(w), None, who, reason, remedy) for w in bad)
        )
    return _Translator(table, read_words(table, words, who), who, memory_of).run()


def _is_text(word: str) -> bool:
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in word


class _Translator:
    """Collects the outcome of every flag of one reading."""

    def __init__(self, dialect: Dialect, reading: Reading, who: str, memory_of: MemoryOf) -> None:
        self._dialect, self._reading, self._who, self._memory_of = dialect, reading, who, memory_of
        self._settings: dict[str, Setting] = {}
        self._notes: list[str] = []
        self._rejections: list[Rejected] = list(reading.rejections)

    def run(self) -> Translation:
        said = self._last_of_each()
        others = {each.row.name: each.text for each in said if each.row is not None}
        device = next((each.text for each in said if _target(each) == "device"), None)
        for each in said:
            if each.row is not None:
                given = Given(each.flag, each.text, each.row, others, lambda: self._memory_of(device))
                self._add_row(each, each.row, convert(given))
            elif each.argument is not None:
                self._add_own(each, each.argument)
        return Translation(
            self._dialect.name,
            tuple(self._settings.values()),
            tuple(self._reading.passed),
            tuple(self._notes),
            tuple(self._rejections),
        )

    def _last_of_each(self) -> list[Said]:
        """What was said, a flag given twice only as it was said last."""
        last: dict[str, Said] = {}
        for each in self._reading.said:
            name = _key(each)
            if name in last and last[name].text != each.text:
                self._notes.append(f"{each.flag} is given more than once; the last one holds")
            last[name] = each
        return list(last.values())

    def _add_row(self, said: Said, row: Row, outcome: Converted | Unfit) -> None:
        shown = _shown(said)
        if isinstance(outcome, Converted) and not all(map(_is_text, outcome.settings.values())):
            outcome = Unfit("bad_text", "it holds what is no valid text", "Write it in UTF-8, without NUL.")
        if isinstance(outcome, Unfit):
            refused = Rejected(outcome.code, short(said.flag), shown, self._who, outcome.reason, outcome.remedy)
            self._rejections.append(refused)
            return
        added = [self._add(name, text, said) for name, text in outcome.settings.items()]
        told = ", ".join(_told(setting) for setting in added if setting is not None)
        reasons = "; ".join(reason for reason in (outcome.note, row.note) if reason)
        unchanged = list(outcome.settings.values()) == [said.text] and row.conversion != "opposite"
        if row.note or outcome.note or not (row.conversion == PLAIN or unchanged):
            self._notes.append(_sentence(_as_said(said, shown), told, reasons))

    def _add_own(self, said: Said, argument: Argument) -> None:
        if (replacement := argument.replaced_by) is not None:
            if said.text == "true":
                text = replacement.value or self._text_of(replacement.same_as)
                self._add(replacement.argument, text, said)
            self._notes.append(f"{short(said.flag)}: deprecated; {argument.deprecated}")
            return
        self._add(argument.name, said.text, said)
        plain = "--" + argument.name.replace("_", "-")
        if not self._dialect.ours:
            self._notes.append(f"{short(said.flag)}: an argument of srv itself, taken as it is")
        elif said.flag not in (plain, "--no-" + plain.removeprefix("--")):
            self._notes.append(f"{short(said.flag)}: called {plain} here")

    def _text_of(self, argument: str) -> str:
        """What the command line says of an argument of `srv`, or else its default."""
        found = next((each.text for each in self._reading.said if _target(each) == argument), None)
        return ARGUMENTS[argument].show(ARGUMENTS[argument].default) if found is None else found

    def _add(self, name: str, text: str, said: Said) -> Setting | None:
        argument = find_argument(name)
        if argument is None:
            raise InternalError(f"the table of {self._dialect.name} names {name}, which is no argument")
        setting = Setting(argument.name, text, said.flag, _as_said(said, _shown(said)))
        before = self._settings.get(argument.name)
        if before is not None and before.text != text:
            reason = f"it asks for {_told(setting)}, and {short(before.flag)} for {_told(before)}"
            remedy = "Leave out one of the two."
            self._rejections.append(Rejected("contradiction", short(said.flag), None, self._who, reason, remedy))
            return None
        self._settings[argument.name] = setting if before is None else before
        return setting


def _key(said: Said) -> str:
    """What two flags have in common if the later one replaces the earlier."""
    if said.row is None:
        return "argument:" + _target(said)
    return plain(said.flag) if said.row.refused else said.row.name


def _target(said: Said) -> str:
    """The argument of `srv` that a flag is about: its own, or that of its row."""
    return said.argument.name if said.argument is not None else said.row.to if said.row is not None else ""


def _shown(said: Said) -> str:
    """The text that was said, shortened; hidden if what it is about is secret."""
    names = said.row.targets if said.row is not None else (_target(said),)
    return HIDDEN if _secret(names) else short(said.text)


def _as_said(said: Said, shown: str) -> str:
    """The flag with its value; a negated switch has none."""
    negated = said.row is not None and said.row.takes == "switch" and plain(said.flag).startswith("--no-")
    return short(said.flag) if negated else f"{short(said.flag)} {shown}".rstrip()


def _secret(names: Iterable[str]) -> bool:
    return any(argument.arg.secret for name in names if (argument := find_argument(name)) is not None)


def _told(setting: Setting) -> str:
    shown = HIDDEN if ARGUMENTS[setting.argument].arg.secret else short(setting.text)
    return f"{setting.argument} = {shown}"


def _sentence(said: str, told: str, reasons: str) -> str:
    if told:
        return f"{said}: {told}{f' ({reasons})' if reasons else ''}"
    return f"{said}: {reasons or 'srv does so without being told'}"
