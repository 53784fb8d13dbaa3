"""Read vendors' published support tables, and our reasons for differences, from `support_matrix/published/`.

`index.toml` lists the tables, the platform of each, and the column of each variant. Flags with another name in `srv`
are listed there under `renamed`. This module compares nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srv.args.config import find_argument
from srv.args.spec import Argument
from srv_matrix.repository import MatrixError, read_toml

_COLUMNS = ("group", "argument", "aliases", "default", "options")
_TYPE_PREFIXES = ("type:", "bool flag", "list[", "optional[", "n/a")


@dataclass(frozen=True, slots=True)
class Row:
    """One published row. `options`: the listed values, () if the column has a type. `supported`: by variant."""

    section: str
    flag: str
    aliases: tuple[str, ...]
    default: str
    options_text: str
    supported: Mapping[str, bool]

    @property
    def options(self) -> tuple[str, ...]:
        text = self.options_text.strip()
        if not text or text.lower().startswith(_TYPE_PREFIXES) or not any(char.isalpha() for char in text):
            return ()
        return tuple(part.strip().strip("'\"") for part in text.split(",") if part.strip())


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why rows have an outcome."""

    outcome: str
    flags: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Table:
    """A published table. `variants`: our variant -> its column. `renamed`: its flag -> our argument's name."""

    name: str
    platform: str
    title: str
    variants: Mapping[str, str]
    rows: tuple[Row, ...]
    reasons: tuple[Reason, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def sections(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.section for row in self.rows))

    def argument(self, row: Row) -> Argument | None:
        """Our argument for a row, by `renamed`, flag or alias; None if there is none."""
        spellings = (self.renamed.get(row.flag, row.flag), *row.aliases)
        return next((argument for spelling in spellings if (argument := find_argument(spelling)) is not None), None)

    def row_of(self, argument: Argument) -> Row | None:
        return next((row for row in self.rows if self.argument(row) is argument), None)


def read_tables(folder: Path) -> tuple[Table, ...]:
    """All tables of `index.toml`; MatrixError if one cannot be read."""
    index = folder / "index.toml"
    if not index.exists():
        return ()
    return tuple(read_table(folder, entry) for entry in read_toml(index).get("table", ()))


def read_table(folder: Path, entry: Mapping[str, Any]) -> Table:
    """One table of the index, with its reasons."""
    try:
        variants = dict(entry["variants"])
        rows = read_rows(folder / entry["file"], variants)
        reasons = _reasons(folder / entry["reasons"])
        return Table(
            entry["name"], entry["platform"], entry["title"], variants, rows, reasons, dict(entry.get("renamed", {}))
        )
    except KeyError as error:
        raise MatrixError(f"{folder / 'index.toml'}: a table does not have the key {error}") from error


def read_rows(path: Path, variants: Mapping[str, str]) -> tuple[Row, ...]:
    """The rows of one table's CSV; `variants` as in `Table`.

    MatrixError if it is not such a table, columns or rows are missing, or a mark is neither yes nor no.
    """
    columns = (*_COLUMNS, *variants.values())
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if missing := [column for column in columns if column not in (reader.fieldnames or ())]:
                raise MatrixError(
                    f"{path} lacks columns: {', '.join(missing)}. Its first line must list {', '.join(columns)}"
                )
            rows = tuple(_row(raw, f"{path} line {reader.line_num}", variants) for raw in reader)
    except (OSError, UnicodeError, csv.Error) as error:
        remedy = f"It must be CSV in UTF-8 with the columns {', '.join(columns)}"
        raise MatrixError(f"{path} cannot be read as a table: {error}. {remedy}") from error
    if not rows:
        raise MatrixError(f"{path} has no rows below its header. Add the published rows")
    return rows


def _row(raw: Mapping[Any, Any], where: str, variants: Mapping[str, str]) -> Row:
    if None in raw or None in raw.values():  # this is how DictReader marks rows of a wrong length
        raise MatrixError(f"{where}: the row has more or fewer cells than columns. Quote cells that contain commas")
    supported = {variant: _is_yes(raw[column], where, raw["argument"]) for variant, column in variants.items()}
    return Row(raw["group"], raw["argument"], tuple(raw["aliases"].split()), raw["default"], raw["options"], supported)


def _is_yes(text: str, where: str, flag: str) -> bool:
    if text not in ("yes", "no"):
        raise MatrixError(f"{where}: {flag} has {text!r} instead of yes or no")
    return text == "yes"


def _reasons(path: Path) -> tuple[Reason, ...]:
    entries = read_toml(path).get("reason", ())
    try:
        return tuple(Reason(entry["class"], tuple(entry["arguments"]), entry["reason"]) for entry in entries)
    except KeyError as error:
        raise MatrixError(
            f"{path}: a reason does not have the key {error}. Each must have class, arguments and reason"
        ) from error
