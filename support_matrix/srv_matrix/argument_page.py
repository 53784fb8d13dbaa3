"""The Markdown pages of one platform's arguments: a row per argument, one column for variants that agree in every row.

The page of a platform with a published table has that table's sections, order and columns, so that the two can be
compared; the other pages have our own groups. Descriptions are one line: the reference of arguments has whole texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from srv.args.config import ARGUMENTS
from srv.args.spec import Argument
from srv.platform.manifest import Manifest
from srv_matrix.counts import Counts
from srv_matrix.marks import GENERATED, KEY, escape, headline, shorten, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.page_notes import Column, PageNotes, columns, general_reason
from srv_matrix.published import Row, Table
from srv_matrix.records import Status
from srv_matrix.variants_table import variants_table

PLANNED = "planned.md"
_OPTIONS = 48  # characters
_DESCRIPTION = {False: 88, True: 56}  # by whether the page has a published layout, with many rows
_REFUSED = 32  # of an argument that no variant accepts


class _Line(NamedTuple):
    """A row before it is written: our argument, or None for a published one that srv does not have."""

    flags: str
    argument: Argument | None


class _Section(NamedTuple):
    heading: str
    lines: Sequence[_Line]


def argument_pages(matrix: Matrix, manifest: Manifest) -> dict[str, str]:
    """The page of a platform by file name; a second one for what the published table does not have."""
    pages = {f"{manifest.name}.md": argument_page(matrix, manifest)}
    if further := _further(matrix, manifest):
        title = f"Arguments on {manifest.name} that are not on the published page"
        pages[f"{manifest.name}-further.md"] = _page(matrix, manifest, title, further, ())
    return pages


def argument_page(matrix: Matrix, manifest: Manifest) -> str:
    """The page named after a platform: all arguments that are implemented, or those of its published table."""
    table = matrix.table_of(manifest.name)
    about = [manifest.summary + ".", "", *variants_table(matrix, [manifest]), "", *_counts(matrix, manifest), ""]
    if table is not None:
        further = f" [Another page]({manifest.name}-further.md) has the other arguments of srv."
        about += [
            f"The sections and their order are those of the published page ({table.title})."
            + (further if _further(matrix, manifest) else ""),
            "",
        ]
    sections = list(_groups() if table is None else _published_sections(table))
    return _page(matrix, manifest, f"Arguments on {manifest.name}", sections, about)


def _further(matrix: Matrix, manifest: Manifest) -> list[_Section]:
    table = matrix.table_of(manifest.name)
    return [] if table is None else list(_groups(apart_from=table))


def _page(matrix: Matrix, manifest: Manifest, title: str, sections: Sequence[_Section], about: Sequence[str]) -> str:
    """Sections with their rows, then runs and reasons."""
    notes = PageNotes()
    shown = _columns(matrix, manifest, sections, notes)
    key = f"{KEY}. [Index](index.md); why arguments are [planned]({PLANNED})."
    lines = [GENERATED, f"# {title}", "", *about, key, ""]
    cells = zip(*(column.cells for column in shown), strict=True)
    for heading, rows in sections:
        lines += [heading, "", *_head(shown)]
        lines += [_row(line, next(cells), matrix, manifest, notes) for line in rows]
        lines.append("")
    return text_of([*lines, *notes.lines()])


def _counts(matrix: Matrix, manifest: Manifest) -> Iterator[str]:
    for variant in manifest.variants:
        cells = (matrix.cell(name, manifest.name, variant) for name in ARGUMENTS)
        yield f"- `{variant}`: {Counts.of(cell for cell in cells if cell is not None)}."


def planned_page() -> str:
    """Arguments that core implements on no platform, which a launch refuses, with their reasons."""
    lines = [GENERATED, "# Planned arguments", ""]
    lines += ["A launch refuses them on every platform. Each is here with the reason that it states.", ""]
    lines += ["Argument | Description | Why it is refused", "--- | --- | ---"]
    for argument in ARGUMENTS.values():
        if argument.arg.planned:
            texts = headline(argument.arg.help, _DESCRIPTION[False]), argument.arg.planned
            lines.append(" | ".join([_code(argument.flags), *map(escape, texts)]))
    return text_of(lines)


def _groups(apart_from: Table | None = None) -> Iterator[_Section]:
    """Our own groups, without what core implements nowhere, or what a published page has."""
    shown = [argument for argument in ARGUMENTS.values() if not argument.arg.planned]
    if apart_from is not None:
        shown = [argument for argument in shown if apart_from.row_of(argument) is None]
    for group in dict.fromkeys(argument.group for argument in shown):
        lines = [_Line(_code(argument.flags), argument) for argument in shown if argument.group == group]
        yield _Section(f"## {group.replace('_', ' ').capitalize()}", lines)


def _published_sections(table: Table) -> Iterator[_Section]:
    for section in table.sections:
        rows = (row for row in table.rows if row.section == section)
        yield _Section(f"## {section}", [_Line(_row_flags(row, table), table.argument(row)) for row in rows])


def _columns(matrix: Matrix, manifest: Manifest, sections: Sequence[_Section], notes: PageNotes) -> list[Column]:
    """The cells, in the order of rows; with a column for each variant on a published page."""
    lines = list(chain.from_iterable(section.lines for section in sections))
    cells = {
        (manifest.name, variant): [_cell(line, variant, matrix, manifest, notes) for line in lines]
        for variant in manifest.variants
    }
    if matrix.table_of(manifest.name) is None:
        return columns(cells)
    return [Column(platform, (variant,), tuple(texts)) for (platform, variant), texts in cells.items()]


def _cell(line: _Line, variant: str, matrix: Matrix, manifest: Manifest, notes: PageNotes) -> str:
    if line.argument is None:
        return notes.cell(None)
    record = matrix.cell(line.argument.name, manifest.name, variant)
    if record is None:
        return notes.cell(None)
    marks = _footnotes(line.argument, matrix, manifest, notes)
    return notes.cell(record) + (marks[manifest.variants.index(variant)] if len(set(marks)) > 1 else "")


def _footnotes(argument: Argument, matrix: Matrix, manifest: Manifest, notes: PageNotes) -> list[str]:
    """The mark of the reason on each variant."""
    cells = [matrix.cell(argument.name, manifest.name, variant) for variant in manifest.variants]
    if argument.arg.planned and all(cell is not None and cell.status is Status.PLANNED for cell in cells):
        return [""] * len(cells)  # the page of planned arguments has the reason
    return ["" if cell is None else notes.footnote(cell.reason_code, general_reason(cell)) for cell in cells]


def _head(shown: Sequence[Column]) -> Iterator[str]:
    names = [f"{', '.join(column.variants).upper()} Supported" for column in shown]
    yield " | ".join(["Argument", "Description", "Defaults", "Options", *names])
    yield " | ".join(["---"] * 4 + [":-:"] * len(names))


def _row(line: _Line, cells: Sequence[str], matrix: Matrix, manifest: Manifest, notes: PageNotes) -> str:
    """A reason that all variants share is a footnote of the argument, any other one of its cell."""
    argument = line.argument
    if argument is None:
        return " | ".join([line.flags, "-", "-", "-", *cells])
    marks = set(_footnotes(argument, matrix, manifest, notes))
    of_variants = (matrix.cell(argument.name, manifest.name, variant) for variant in manifest.variants)
    accepted = any(cell.status.works for cell in of_variants if cell is not None)
    limit = _DESCRIPTION[matrix.table_of(manifest.name) is not None]
    texts = [
        line.flags + (marks.pop() if len(marks) == 1 else ""),
        escape(headline(argument.arg.help, limit if accepted else _REFUSED)),
        _default(argument, matrix, manifest),
        escape(shorten(_options(argument, matrix, manifest), _OPTIONS)) if accepted else "-",
    ]
    return " | ".join([*texts, *cells])


def options(argument: Argument) -> str:
    """The valid values of an argument, as text."""
    if argument.kind.base is bool:
        return "true, false"
    if argument.choices:
        return ", ".join(argument.choices)
    expected = f", {argument.expected}" if argument.expected else ""
    return f"Type: {argument.kind.name}{expected}"


def _options(argument: Argument, matrix: Matrix, manifest: Manifest) -> str:
    """As `options`, but for a string without choices the values that the platform declares as working."""
    if argument.choices or argument.kind.base in (bool, int, float):
        return options(argument)
    cells = (
        cell for variant in manifest.variants for cell in matrix.values.get((argument.name, manifest.name, variant), ())
    )
    values = dict.fromkeys(cell.feature.partition("=")[2] for cell in cells if cell.declared.works)
    return ", ".join(values) or options(argument)


def _default(argument: Argument, matrix: Matrix, manifest: Manifest) -> str:
    by_variant = {variant: matrix.defaults[manifest.name, variant][argument.name] for variant in manifest.variants}
    if len(set(by_variant.values())) == 1:
        return f"`{next(iter(by_variant.values())) or ' '}`"
    return "<br>".join(f"{variant}: `{value}`" for variant, value in by_variant.items())


def _row_flags(row: Row, table: Table) -> str:
    argument = table.argument(row)
    return _code((row.flag, *row.aliases, *(argument.flags if argument is not None else ())))


def _code(flags: Sequence[str]) -> str:
    return "<br>".join(f"`{flag}`" for flag in dict.fromkeys(flags))
