"""The dialect tables, read from the TOML files next to this module and checked for structure.

A row describes one flag of another engine: the equivalent argument of `srv` and the conversion of its value, or the
reason why there is none and a remedy. This module must not know what a conversion computes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType
from typing import Any

from srv.errors import InternalError, Refusal, Rejection

DIALECTS = ("rtp-llm", "vllm", "sglang")
TAKES = ("value", "switch", "list")
STATUSES = ("mapped", "converted", "refused")
IDENTITY = "same"  # the identity conversion


@dataclass(frozen=True, slots=True)
class DialectRow:
    """One flag of another engine.

    flags: its spellings; the first is its name. takes: "value", "switch" (optionally followed by true or false) or
    "list". to: the argument that receives the converted value. conversion: a name in
    `srv.args.dialects.conversions`. values: for the conversion "choice", settings by the flag's value
    (a pattern as in `fnmatch`; {} is the value itself). also: further settings, added whenever the row sets anything.
    factor, template, fields, partners: inputs of other conversions; `fields` are the rows of a JSON object's keys,
    `partners` are other flags of the same command line. yields_to: if that flag is given, this one is ignored.
    harmless: values that need no setting. refused and remedy: why `srv` has no equivalent, and what to do.
    page_rows: how often the engine's page of arguments lists the flag; 0 for a flag that only its code has.
    """

    flags: tuple[str, ...]
    takes: str = "value"
    to: str = ""
    conversion: str = IDENTITY
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    factor: str = "1"
    template: str = ""
    fields: Mapping[str, DialectRow] = field(default_factory=dict)
    partners: tuple[str, ...] = ()
    yields_to: str = ""
    harmless: tuple[str, ...] = ()
    refused: str = ""
    remedy: str = ""
    note: str = ""
    page_rows: int = 1

    @property
    def name(self) -> str:
        return self.flags[0]

    @property
    def status(self) -> str:
        """One of `STATUSES`: refused, mapped (the value is unchanged), or converted."""
        if self.refused:
            return "refused"
        return "mapped" if self.conversion == IDENTITY else "converted"

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the arguments that it can set, without duplicates."""
        targets = [self.to] if self.to else []
        targets += [name for settings in self.values.values() for name in settings]
        targets += [*self.also, *(name for row in self.fields.values() for name in row.targets)]
        return tuple(dict.fromkeys(targets))


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's table.

    engine: its display name. launchers: the beginnings of its command lines, which are skipped.
    positional: the flag that a positional argument stands for. ours: whether its flags without a row are those of
    `srv`. defaults: of the engine, by argument of `srv`, where users rely on a value that they do not set.
    """

    name: str
    engine: str
    rows: tuple[DialectRow, ...]
    launchers: tuple[tuple[str, ...], ...] = ()
    positional: str = ""
    ours: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def by_flag(self) -> Mapping[str, DialectRow]:
        """Rows by every spelling of their flags, as `normalize_flag` returns it."""
        return MappingProxyType({normalize_flag(flag): row for row in self.rows for flag in row.flags})

    def counts(self, of_page: bool = True) -> Mapping[str, int]:
        """Number of rows by status: of the engine's page, or (`of_page=False`) of flags that the page does not list."""
        counted = dict.fromkeys(STATUSES, 0)
        for row in self.rows:
            counted[row.status] += row.page_rows if of_page else row.page_rows == 0
        return MappingProxyType(counted)


def normalize_flag(flag: str) -> str:
    """A flag with hyphens: engines accept `--tp_size` for `--tp-size`."""
    stem = flag.lstrip("-")
    return flag[: len(flag) - len(stem)] + stem.replace("_", "-")


def read_dialect(name: str) -> Dialect:
    """The table of one of `DIALECTS`; Refusal for any other name."""
    if name not in DIALECTS:
        reason, remedy = "there is no such dialect", f"Available dialects: {', '.join(DIALECTS)}."
        raise Refusal([Rejection("unknown_dialect", repr(name), None, "command line", reason, remedy)])
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    rows = tuple(_read_row(raw) for raw in table["row"])
    dialect = Dialect(
        name,
        table["engine"],
        rows,
        tuple(tuple(launcher.split()) for launcher in table.get("launchers", ())),
        table.get("positional", ""),
        table.get("ours", False),
        table.get("defaults", {}),
    )
    if len(dialect.by_flag) != sum(len(row.flags) for row in rows):
        raise InternalError(f"{name}.toml: {_duplicate_flag(rows)} occurs in two rows")
    return dialect


def _duplicate_flag(rows: Iterable[DialectRow]) -> str:
    seen: set[str] = set()
    for flag in (normalize_flag(flag) for row in rows for flag in row.flags):
        if flag in seen:
            return flag
        seen.add(flag)
    return "no flag"


def _read_row(raw: Mapping[str, Any]) -> DialectRow:
    fields = dict(raw)
    for name in ("flags", "partners", "harmless"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "fields" in fields:
        fields["fields"] = {key: _read_row({"flags": [key], **inner}) for key, inner in fields["fields"].items()}
    try:
        row = DialectRow(**fields)
    except TypeError as error:
        raise InternalError(f"a row of a dialect is malformed: {raw}: {error}") from error
    if row.takes not in TAKES or (row.refused and not row.remedy):
        raise InternalError(f"a row of a dialect is malformed: {raw}")
    return row
