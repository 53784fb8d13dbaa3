"""The tables of dialects, read from the TOML files beside this module and checked for shape.

A row says for one flag of another engine which argument of `srv` carries its meaning and how its value is
converted, or why nothing does and what to do instead. What a conversion computes is not known here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType
from typing import Any

from srv.errors import InternalError, Refusal, Rejected

DIALECTS = ("rtp-llm", "vllm", "sglang")
TAKES = ("value", "switch", "list")
STATUSES = ("mapped", "converted", "refused")
PLAIN = "same"  # the conversion that changes nothing


@dataclass(frozen=True, slots=True)
class Row:
    """One flag of another engine.

    flags: its spellings; the first is its name. takes: "value", "switch" (with or without true or false after
    it) or "list". to: the argument that takes the converted value. conversion: a name in
    `srv.args.dialects.conversions`. values: for the conversion "choice", arguments and texts by the flag's value
    (a pattern as in `fnmatch`; {} is the value itself). also: what is said besides, whenever anything is. factor,
    template, fields, partners: what other conversions need; `fields` are the rows of a JSON object's keys,
    `partners` other flags of the same command line. yields_to: if that flag is given, this one says nothing.
    harmless: values that change nothing here. refused and remedy: why nothing of `srv` carries the meaning, and
    what to do. page_rows: how often the engine's page of arguments lists the flag; 0 for one that its code knows
    and the page does not.
    """

    flags: tuple[str, ...]
    takes: str = "value"
    to: str = ""
    conversion: str = PLAIN
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    factor: str = "1"
    template: str = ""
    fields: Mapping[str, Row] = field(default_factory=dict)
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
        """One of `STATUSES`: refused, mapped (a value stays as it is), or converted."""
        if self.refused:
            return "refused"
        return "mapped" if self.conversion == PLAIN else "converted"

    @property
    def targets(self) -> tuple[str, ...]:
        """The arguments that it can set, by name, each once."""
        said = [self.to] if self.to else []
        said += [name for settings in self.values.values() for name in settings]
        said += [*self.also, *(name for row in self.fields.values() for name in row.targets)]
        return tuple(dict.fromkeys(said))


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's table.

    engine: its name for a reader. launchers: words with which its command lines begin and that mean nothing here.
    positional: the flag that a first bare word stands for. ours: whether its flags are those of `srv` unless a
    row says otherwise.
    """

    name: str
    engine: str
    rows: tuple[Row, ...]
    launchers: tuple[tuple[str, ...], ...] = ()
    positional: str = ""
    ours: bool = False

    @property
    def by_flag(self) -> Mapping[str, Row]:
        """Rows by every spelling of their flags, as `plain` writes it."""
        return MappingProxyType({plain(flag): row for row in self.rows for flag in row.flags})

    def counts(self, of_page: bool = True) -> Mapping[str, int]:
        """How many rows of the engine's page (or else: how many further flags) have each status."""
        counted = dict.fromkeys(STATUSES, 0)
        for row in self.rows:
            counted[row.status] += row.page_rows if of_page else row.page_rows == 0
        return MappingProxyType(counted)


def plain(flag: str) -> str:
    """A flag with hyphens: engines take `--tp_size` for `--tp-size`."""
    stem = flag.lstrip("-")
    return flag[: len(flag) - len(stem)] + stem.replace("_", "-")


def read_dialect(name: str) -> Dialect:
    """The table of one of `DIALECTS`; Refusal for any other name."""
    if name not in DIALECTS:
        reason, remedy = "there is no such dialect", f"There are: {', '.join(DIALECTS)}."
        raise Refusal([Rejected("unknown_dialect", repr(name), None, "command line", reason, remedy)])
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
    )
    if len(dialect.by_flag) != sum(len(row.flags) for row in rows):
        raise InternalError(f"{name}.toml: {_twice(rows)} stands in two rows")
    return dialect


def _twice(rows: Iterable[Row]) -> str:
    seen: set[str] = set()
    for flag in (plain(flag) for row in rows for flag in row.flags):
        if flag in seen:
            return flag
        seen.add(flag)
    return "no flag"


def _read_row(raw: Mapping[str, Any]) -> Row:
    said = dict(raw)
    for name in ("flags", "partners", "harmless"):
        if name in said:
            said[name] = tuple(said[name])
    if "fields" in said:
        said["fields"] = {key: _read_row({"flags": [key], **inner}) for key, inner in said["fields"].items()}
    try:
        row = Row(**said)
    except TypeError as error:
        raise InternalError(f"a row of a dialect is not well formed: {raw}: {error}") from error
    if row.takes not in TAKES or (row.refused and not row.remedy):
        raise InternalError(f"a row of a dialect is not well formed: {raw}")
    return row
