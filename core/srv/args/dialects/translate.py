"""Translate another engine's command line into settings of `srv`, notes and refusals.

Two flags that set one argument to different values are refused. If the same flag is repeated, the last one wins, as in
its engine. Values are not validated here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from srv.args.config import argument_named, find_any_argument
from srv.args.dialects.conversions import convert
from srv.args.dialects.interface import ConversionInput, Converted, Untranslatable
from srv.args.dialects.table import IDENTITY, Dialect, DialectRow, normalize_flag, read_dialect
from srv.args.dialects.words import ParsedCommand, ParsedFlag, parse_command, short
from srv.args.spec import HIDDEN, Argument
from srv.errors import InternalError, Rejection

MemoryOf = Callable[[str | None], int | None]


@dataclass(frozen=True, slots=True)
class Setting:
    """One argument of `srv`, its value as text, and the other engine's flag that it comes from.

    `original`: the flag with its value as the user wrote it, shortened; a secret value is hidden.
    """

    argument: str
    text: str
    flag: str
    original: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words of a command line; none for a `disable_` switch that is false, which is written without a flag."""
        declared = argument_named(self.argument)
        if declared.kind.base is bool and not declared.kind.many and self.text in ("true", "false"):
            if self.text == "true":
                return (declared.flag,)
            return () if declared.name.startswith("disable_") else ("--no-" + declared.flag.removeprefix("--"),)
        return (f"{declared.flag}={self.text}",) if self.text.startswith("-") else (declared.flag, self.text)

    @property
    def value(self) -> Any:
        """The value in a YAML file; the text itself if the argument cannot parse it."""
        declared = argument_named(self.argument)
        try:
            return declared.kind.dump(declared.parse(self.text))
        except ValueError:
            return self.text


@dataclass(frozen=True, slots=True)
class Translation:
    """The translation of another engine's command line. `passthrough`: words that are left unchanged for `srv`."""

    dialect: str
    settings: tuple[Setting, ...]
    passthrough: tuple[str, ...]
    notes: tuple[str, ...]
    rejections: tuple[Rejection, ...]

    @property
    def words(self) -> list[str]:
        """The command line in the spelling of `srv`, without the command."""
        return [*(word for setting in self.settings for word in setting.words), *self.passthrough]

    @property
    def command(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(["srv", "launch", *self.words])

    @property
    def values(self) -> dict[str, Any]:
        """Typed values by argument, as in a configuration file."""
        return {setting.argument: setting.value for setting in self.settings}


def translate(dialect: str, words: Sequence[str], memory_of: MemoryOf = lambda device: None) -> Translation:
    """Translate a command line of another engine; Refusal if there is no such dialect.

    `memory_of` returns the memory of one device in bytes, if it is known, by the text of `--device` (None: not given).
    It is called only if a size in bytes must be converted to a fraction.
    """
    table = read_dialect(dialect)
    source = f"command line, as {table.engine}"
    bad = [word for word in words if not _is_text(word)]
    if bad:
        reason, remedy = "it is not valid text", "Write it in UTF-8, without NUL."
        return Translation(
            dialect, (), (), (), tuple(Rejection("bad_text", ascii(w), None, source, reason, remedy) for w in bad)
        )
    return _Translator(table, parse_command(table, words, source), source, memory_of).run()


def _is_text(word: str) -> bool:
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in word


class _Translator:
    """Collects the outcomes of all flags of one command line."""

    def __init__(self, dialect: Dialect, command: ParsedCommand, source: str, memory_of: MemoryOf) -> None:
        self._dialect, self._command, self._source, self._memory_of = dialect, command, source, memory_of
        self._settings: dict[str, Setting] = {}
        self._notes: dict[str, dict[str, None]] = {}  # sentence -> the flags that it is about
        self._rejections: list[Rejection] = list(command.rejections)

    def run(self) -> Translation:
        flags = self._last_of_each()
        others = {flag.row.name if flag.row is not None else _plain(_target(flag)): flag.text for flag in flags}
        device = next((flag.text for flag in flags if _target(flag) == "device"), None)
        for flag in flags:
            if flag.row is not None:
                setting = ConversionInput(flag.flag, flag.text, flag.row, others, lambda: self._memory_of(device))
                self._add_row(flag, flag.row, convert(setting))
            elif flag.argument is not None:
                self._add_own(flag, flag.argument)
        return Translation(
            self._dialect.name,
            tuple(self._settings.values()),
            tuple(self._command.passthrough),
            (*self._folded_notes(), *self._other_defaults()),
            tuple(self._rejections),
        )

    def _note(self, flag: str, sentence: str) -> None:
        self._notes.setdefault(sentence, {})[flag] = None

    def _folded_notes(self) -> list[str]:
        """One note per sentence, with all flags that it is about."""
        return [f"{', '.join(flags)}: {sentence}" for sentence, flags in self._notes.items()]

    def _other_defaults(self) -> list[str]:
        """Notes on values that the engine and `srv` choose differently if no flag sets them."""
        defaults = []
        for name, theirs in self._dialect.defaults.items():
            argument = argument_named(name)
            if name not in self._settings and theirs != (ours := argument.show(argument.default)):
                difference = f"without {argument.flag}, {self._dialect.engine} has {theirs} and srv {ours}"
                defaults.append(f"{difference}: set {argument.flag} {theirs} to keep it")
        return defaults

    def _last_of_each(self) -> list[ParsedFlag]:
        """The flags in order; of a repeated flag, only the last occurrence."""
        last: dict[str, ParsedFlag] = {}
        for flag in self._command.flags:
            name = _key(flag)
            if name in last and last[name].text != flag.text:
                self._note(short(flag.flag), "given more than once; the last one wins")
            last[name] = flag
        return list(last.values())

    def _add_row(self, flag: ParsedFlag, row: DialectRow, outcome: Converted | Untranslatable) -> None:
        shown = _shown(flag)
        if isinstance(outcome, Converted) and not all(map(_is_text, outcome.settings.values())):
            outcome = Untranslatable("bad_text", "its value contains invalid text", "Write it in UTF-8, without NUL.")
        if isinstance(outcome, Untranslatable):
            refused = Rejection(outcome.code, short(flag.flag), shown, self._source, outcome.reason, outcome.remedy)
            self._rejections.append(refused)
            return
        added = [self._add(name, text, flag) for name, text in outcome.settings.items()]
        settings = ", ".join(_as_setting(setting) for setting in added if setting is not None)
        reasons = "; ".join(reason for reason in (outcome.note, row.note) if reason)
        unchanged = list(outcome.settings.values()) == [flag.text] and row.conversion != "opposite"
        if row.note or outcome.note or not (row.conversion == IDENTITY or unchanged):
            self._note(_as_written(flag, shown), _sentence(settings, reasons))

    def _add_own(self, flag: ParsedFlag, argument: Argument) -> None:
        if (replacement := argument.replaced_by) is not None:
            if flag.text == "true":
                text = replacement.value or self._text_of(replacement.same_as)
                self._add(replacement.argument, text, flag)
            self._note(short(flag.flag), f"deprecated; {argument.deprecated}")
            return
        self._add(argument.name, flag.text, flag)
        plain = _plain(argument.name)
        if not self._dialect.ours:
            self._note(short(flag.flag), "an argument of srv itself, used unchanged")
        elif flag.flag not in (plain, "--no-" + plain.removeprefix("--")):
            self._note(short(flag.flag), f"called {plain} in srv")

    def _text_of(self, argument: str) -> str:
        """The text of an argument of `srv` on the command line, or else its default."""
        text = next((flag.text for flag in self._command.flags if _target(flag) == argument), None)
        return argument_named(argument).show(argument_named(argument).default) if text is None else text

    def _add(self, name: str, text: str, flag: ParsedFlag) -> Setting | None:
        argument = find_any_argument(name)
        if argument is None:
            raise InternalError(f"the table of {self._dialect.name} names {name}, which is not an argument")
        setting = Setting(argument.name, text, flag.flag, _as_written(flag, _shown(flag)))
        before = self._settings.get(argument.name)
        if before is not None and before.text != text:
            reason = f"it sets {_as_setting(setting)}, but {short(before.flag)} sets {_as_setting(before)}"
            remedy = "Leave out one of the two."
            self._rejections.append(Rejection("contradiction", short(flag.flag), None, self._source, reason, remedy))
            return None
        self._settings[argument.name] = setting if before is None else before
        return setting


def _key(flag: ParsedFlag) -> str:
    """The key by which a later flag replaces an earlier one."""
    if flag.row is None:
        return "argument:" + _target(flag)
    return normalize_flag(flag.flag) if flag.row.refused else flag.row.name


def _target(flag: ParsedFlag) -> str:
    """The argument of `srv` that a flag sets: its own, or that of its row."""
    return flag.argument.name if flag.argument is not None else flag.row.to if flag.row is not None else ""


def _plain(argument: str) -> str:
    """The flag of an argument of `srv`, by its name."""
    return "--" + argument.replace("_", "-")


def _shown(flag: ParsedFlag) -> str:
    """The value, shortened; hidden if it is secret."""
    names = flag.row.targets if flag.row is not None else (_target(flag),)
    return HIDDEN if _secret(names) else short(flag.text)


def _as_written(flag: ParsedFlag, shown: str) -> str:
    """The flag with its value; a negated switch has none."""
    negated = flag.row is not None and flag.row.takes == "switch" and normalize_flag(flag.flag).startswith("--no-")
    return short(flag.flag) if negated else f"{short(flag.flag)} {shown}".rstrip()


def _secret(names: Iterable[str]) -> bool:
    return any(argument.arg.secret for name in names if (argument := find_any_argument(name)) is not None)


def _as_setting(setting: Setting) -> str:
    shown = HIDDEN if argument_named(setting.argument).arg.secret else short(setting.text)
    return f"{setting.argument} = {shown}"


def _sentence(settings: str, reasons: str) -> str:
    if settings:
        return f"{settings}{f' ({reasons})' if reasons else ''}"
    return reasons or "this is the default of srv"
