"""The Markdown pages of models, endpoints, ops and pairs of arguments: a row per feature, a column per variants that
agree in every row. Rows of one model or op that agree are one row, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from srv.args.config import ARGUMENTS
from srv_matrix.marks import GENERATED, KEY, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.page_notes import Column, PageNotes, columns, general_reason
from srv_matrix.records import Kind, Record
from srv_matrix.weight_methods import method_of


class Described(NamedTuple):
    """What a page of features is called, and says at its beginning."""

    title: str
    about: str


KINDS: Mapping[Kind, Described] = {
    "model": Described(
        "Models",
        "Architecture and file format. The first rows are implemented in srv; the last row stands for all other "
        "architectures, which transformers implements. [Quantized checkpoints](quantized.md) have a page of their own.",
    ),
    "endpoint": Described(
        "Endpoints",
        "The API process implements them in core, independently of the platform. On a platform without device code no "
        "server starts.",
    ),
    "op": Described(
        "Ops", "The ops of the kernel contracts by dtype, and whether the platform's package implements them."
    ),
    "pair": Described(
        "Pairs of arguments",
        "Arguments whose valid values depend on each other, by a constraint of core, of the platform, or of a backend. "
        "Backends are checked with a common model, with latent attention (MLA), with dual chunk attention and with "
        "GPT-OSS. Constraints that apply only to other models are not listed, nor are defaults that depend on another "
        "argument.",
    ),
}


def page_name(kind: Kind) -> str:
    return f"{kind}s.md"


def feature_pages(matrix: Matrix) -> dict[str, str]:
    """The pages by file name; kinds without records have none."""
    by_kind = {kind: features_of(matrix, kind) for kind in KINDS}
    return {page_name(kind): _page(matrix, kind, features) for kind, features in by_kind.items() if features}


def features_of(matrix: Matrix, kind: Kind) -> Mapping[str, Sequence[Record]]:
    """The records of a kind by feature, without models in quantized checkpoints."""
    return {name: records for name, records in matrix.of_kind(kind).items() if method_of(name) is None}


def _page(matrix: Matrix, kind: Kind, features: Mapping[str, Sequence[Record]]) -> str:
    title, about = KINDS[kind]
    notes = PageNotes(platforms=True)
    table = list(_table(matrix, kind, features, notes))
    lines = [GENERATED, f"# {title}", "", about, "", f"{KEY}. [Index](index.md).", "", *table, "", *notes.lines()]
    return text_of(lines)


def _table(matrix: Matrix, kind: Kind, features: Mapping[str, Sequence[Record]], notes: PageNotes) -> Iterator[str]:
    shared = {name: _shared(kind, records, notes) for name, records in features.items()}
    cells: dict[tuple[str, str], list[str]] = {
        (manifest.name, variant): [] for manifest in matrix.manifests for variant in manifest.variants
    }
    for name, records in features.items():
        by_place = {(record.platform, record.variant): record for record in records}
        for place, texts in cells.items():
            texts.append(_cell(kind, by_place.get(place), notes, with_note=not shared[name]))
    shown = columns(cells)
    yield head(kind.capitalize(), shown)
    yield from _rows(kind, features, shared, shown)


def head(first: str, shown: Sequence[Column]) -> str:
    """The two lines at the top of a table with a column of names and these."""
    names = [f"{column.platform}: {', '.join(column.variants)}" for column in shown]
    return " | ".join([first, *names]) + "\n" + " | ".join(["---", *[":-:"] * len(names)])


def _rows(
    kind: Kind, features: Mapping[str, Sequence[Record]], shared: Mapping[str, str], shown: Sequence[Column]
) -> Iterator[str]:
    merged: dict[tuple[str, ...], list[str]] = {}
    for name, texts in zip(features, zip(*(column.cells for column in shown), strict=True), strict=True):
        stem, part = _named(kind, name.partition(":")[2])
        merged.setdefault((stem, shared[name], *texts), []).append(part)
    for (stem, footnote, *cells), parts in merged.items():
        yield " | ".join([f"{stem} {', '.join(parts)}".strip() + footnote, *cells])


def _named(kind: Kind, name: str) -> tuple[str, str]:
    """What a row is called, and the part that may differ between rows that are one: the dtype, the format of files."""
    if kind == "pair":
        return " with ".join(f"`{ARGUMENTS[part].flag}`" for part in name.split("+")), ""
    if kind in ("op", "model"):
        stem, _, part = name.rpartition("/")
        return f"`{stem}`", part
    return f"`{name}`", ""


def _shared(kind: Kind, records: Sequence[Record], notes: PageNotes) -> str:
    """The footnote of a row, if all its cells have the same reason."""
    marks = {notes.footnote(record.reason_code, _reason(kind, record)) for record in records}
    return marks.pop() if len(marks) == 1 else ""


def _cell(kind: Kind, record: Record | None, notes: PageNotes, *, with_note: bool) -> str:
    if record is None:
        return "-"
    return notes.cell(record) + (notes.footnote(record.reason_code, _reason(kind, record)) if with_note else "")


def _reason(kind: Kind, record: Record) -> str:
    """Without the class of the model, so that the reasons of several are one footnote."""
    reason = general_reason(record)
    if kind != "model":
        return reason
    name = record.feature.partition(":")[2].partition("/")[0]
    return re.sub(rf"\b{re.escape(name)}\b", "the model", reason)
