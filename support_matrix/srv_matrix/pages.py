"""The Markdown pages: an index, one page per platform, one per published table. This module writes no files.

The page of a platform with a published table has that table's sections, order and columns, so that the two can be
compared; the other pages have our own groups. Pages depend on committed inputs only: no date, no commit, no machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from srv.args.config import ARGUMENTS
from srv.args.spec import Argument
from srv.platform.manifest import Manifest
from srv_matrix.architectures import NAME as ARCHITECTURES
from srv_matrix.architectures import architecture_page
from srv_matrix.diff import Outcome, compare_table, counts
from srv_matrix.feature_page import NAME as FEATURES
from srv_matrix.feature_page import feature_page
from srv_matrix.marks import GENERATED, WORDS, escape, mark, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.published import Row, Table
from srv_matrix.records import LEVELS, STARTS, Level, Status
from srv_matrix.weight_methods import method_of
from srv_matrix.weight_methods_page import NAME as WEIGHTS
from srv_matrix.weight_methods_page import weight_methods_page

_ARCHITECTURES_LINE = (
    f"- [Architectures]({ARCHITECTURES}): every causal class of transformers, served or refused with its reason."
)
_WEIGHTS_LINE = f"- [Models by weight format]({WEIGHTS}): each native decoder in each quantization method."
MEANINGS = {
    Status.SUPPORTED: "all values are accepted; shown as the name of its level until it has been run on the device",
    Status.LIMITED: "only some values are accepted, or only in some combinations",
    Status.EXPERIMENTAL: "accepted, but may change or break",
    Status.UNKNOWN: "nothing is declared",
    Status.PLANNED: "refused so far: core does not implement it on any platform yet, or there is no device code yet",
    Status.UNSUPPORTED: "refused, because the platform does not support it",
    Status.NOT_APPLICABLE: "refused, because it has no meaning on this platform",
}


def pages(matrix: Matrix) -> dict[str, str]:
    """Every page by file name."""
    generated = {"index.md": index_page(matrix), FEATURES: feature_page(matrix)}
    if any(map(method_of, matrix.of_kind("model"))):
        generated[WEIGHTS] = weight_methods_page(matrix)
    if matrix.architectures is not None:
        generated[ARCHITECTURES] = architecture_page(matrix.architectures)
    generated |= {f"{each.name}.md": platform_page(matrix, each) for each in matrix.manifests}
    return generated | {f"published-{table.name}.md": published_page(matrix, table) for table in matrix.tables}


def index_page(matrix: Matrix) -> str:
    """The meaning of the marks, and counts by platform."""
    lines = [GENERATED, "# What works where", ""]
    lines += [
        "Each cell combines two facts, what the platform declares and what core implements, and shows the lower one.",
        "The level next to it is the strength of the evidence. Only E4 and E5 were run on the device, and are shown as",
        "✅ yes. Cells below E4 are shown with the name of their level: a declaration comes from the same rules that",
        "accept or refuse the argument when a server starts, but nothing was run.",
        "",
        *_counts_table(matrix),
        "",
        "## Statuses",
        "",
        "| Word | Status | Meaning |",
        "| --- | --- | --- |",
        *(f"| {WORDS[each]} | `{each.value}` | {meaning} |" for each, meaning in MEANINGS.items()),
        "",
        "## Levels",
        "",
        "| Level | Word | Meaning |",
        "| --- | --- | --- |",
        "| none | | nothing is declared for this platform |",
        *(f"| {level.name} | {level.word} | {meaning} |" for level, meaning in LEVELS.items()),
        "",
        *(["## Evidence", "", *(f"- {run}" for run in matrix.runs), ""] if matrix.runs else []),
        "## Files",
        "",
        f"- [Models, weight formats, endpoints, ops, pairs of arguments]({FEATURES}): features that are not arguments.",
        *([_WEIGHTS_LINE] if any(map(method_of, matrix.of_kind("model"))) else []),
        *([_ARCHITECTURES_LINE] if matrix.architectures is not None else []),
        "- [support.json](support.json) and [support.csv](support.csv): the same cells, for programs.",
        *(
            f"- [{table.title}](published-{table.name}.md): compared with our declarations, row by row."
            for table in matrix.tables
        ),
    ]
    return text_of(lines)


def _counts_table(matrix: Matrix) -> Iterator[str]:
    yield "| Platform | Variant | " + " | ".join(WORDS[each] for each in Status) + " | run on the device |"
    yield "| --- | --- |" + " ---: |" * (len(Status) + 1)
    for manifest in matrix.manifests:
        for variant in manifest.variants:
            cells = [each for name in ARGUMENTS if (each := matrix.cell(name, manifest.name, variant)) is not None]
            counted = Counter(each.status for each in cells)
            numbers = [counted[status] for status in Status] + [sum(each.verified for each in cells)]
            shown = " | ".join(str(number) for number in numbers)
            yield f"| [{manifest.name}]({manifest.name}.md) | {variant} | {shown} |"


def platform_page(matrix: Matrix, manifest: Manifest) -> str:
    """The page of one platform: all arguments, by section."""
    table = matrix.table_of(manifest.name)
    lines = [
        GENERATED,
        f"# Arguments on {manifest.name}",
        "",
        manifest.summary + ".",
        "",
        *_evidence_summary(matrix, manifest),
        "",
    ]
    if table is None:
        groups = dict.fromkeys(argument.group for argument in ARGUMENTS.values())
        for group in groups:
            ours = [(_flags(each), each) for each in ARGUMENTS.values() if each.group == group]
            lines += _section("##", _title(group), ours, matrix, manifest)
        return text_of(lines)
    lines += [f"The sections and their order are those of the published page ({table.title}).", ""]
    for section in table.sections:
        rows = [(_row_flags(row, table), table.argument(row)) for row in table.rows if row.section == section]
        lines += _section("##", section, rows, matrix, manifest)
    known = {argument.name for row in table.rows if (argument := table.argument(row)) is not None}
    further = [(_flags(each), each) for name, each in ARGUMENTS.items() if name not in known]
    if further:
        lines += _section("#", "Arguments that are not on the published page", further, matrix, manifest)
    return text_of(lines)


def _evidence_summary(matrix: Matrix, manifest: Manifest) -> Iterator[str]:
    for variant in manifest.variants:
        cells = [each for each in matrix.records.values() if (each.platform, each.variant) == (manifest.name, variant)]
        ran = [level for each in cells for evidence in each.evidence if (level := evidence.level) >= Level.E3]
        if not ran:
            yield f"- `{variant}`: nothing has been run on this variant yet; all marks are declarations."
        else:
            verified = [each for each in cells if each.verified]
            forced = sum(each.forced for each in verified)
            newer = f", {forced} on a newer device with its code path forced" if forced else ""
            short = [
                each for each in cells if not each.verified and any(one.level is Level.E3 for one in each.evidence)
            ]
            started = sum(each.word == STARTS for each in short)
            starts = f", {started} were only started with" if started else ""
            less = f", {len(short) - started} on a simulated device or only compiled" if len(short) > started else ""
            yield f"- `{variant}`: {len(verified) - forced} cells were run on the device{newer}{starts}{less}."


def _section(
    depth: str, title: str, rows: Sequence[tuple[str, Argument | None]], matrix: Matrix, manifest: Manifest
) -> Iterator[str]:
    """One table, followed by the reasons of all cells that are not fully supported."""
    yield from (f"{depth} {title}", "")
    columns = [
        "Argument",
        "Description",
        "Defaults",
        "Options",
        *(f"{each.upper()} Supported" for each in manifest.variants),
    ]
    yield "| " + " | ".join(columns) + " |"
    yield "| --- | --- | --- | --- |" + " :---: |" * len(manifest.variants)
    for flags, argument in rows:
        yield _row(flags, argument, matrix, manifest)
    yield ""
    reasons = list(_reasons([argument for _, argument in rows if argument is not None], matrix, manifest))
    if reasons:
        yield from ("<details><summary>Reasons</summary>", "", *reasons, "", "</details>", "")


def _row(flags: str, argument: Argument | None, matrix: Matrix, manifest: Manifest) -> str:
    if argument is None:
        return f"| {flags} | | | |" + " not in srv |" * len(manifest.variants)
    marks = [mark(matrix.cell(argument.name, manifest.name, variant)) for variant in manifest.variants]
    description = [
        escape(argument.arg.help),
        _default(argument, matrix, manifest),
        escape(_options(argument, matrix, manifest)),
    ]
    return "| " + " | ".join([flags, *description, *marks]) + " |"


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
    cells = (cell for each in manifest.variants for cell in matrix.values.get((argument.name, manifest.name, each), ()))
    values = dict.fromkeys(cell.feature.partition("=")[2] for cell in cells if cell.declared.works)
    return ", ".join(values) or options(argument)


def _default(argument: Argument, matrix: Matrix, manifest: Manifest) -> str:
    by_variant = {each: matrix.defaults[manifest.name, each][argument.name] for each in manifest.variants}
    if len(set(by_variant.values())) == 1:
        return f"`{next(iter(by_variant.values())) or ' '}`"
    return "<br>".join(f"{variant}: `{value}`" for variant, value in by_variant.items())


def _reasons(arguments: Iterable[Argument], matrix: Matrix, manifest: Manifest) -> Iterator[str]:
    """One line per reason, with the cells that it applies to."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for argument in arguments:
        for variant in manifest.variants:
            cell = matrix.cell(argument.name, manifest.name, variant)
            if cell is not None and cell.reason:
                cells = found.setdefault((cell.reason_code, cell.reason), {})
                cells.setdefault(argument.flag, []).append(variant)
    for (code, reason), cells in found.items():
        shown = [
            f"`{flag}`" + ("" if len(variants) == len(manifest.variants) else f" ({', '.join(variants)})")
            for flag, variants in cells.items()
        ]
        yield f"- {', '.join(shown)}: {escape(reason)}." + (f" `[{code}]`" if code else "")


def published_page(matrix: Matrix, table: Table) -> str:
    """The comparison of a published table with the declarations of our platform."""
    compared = compare_table(matrix, table)
    lines = [GENERATED, f"# {table.title}: compared", ""]
    lines += [f"{len(table.rows)} rows, compared with the declarations of platform `{table.platform}`.", ""]
    lines += ["| Class | Rows |", "| --- | ---: |"]
    lines += [f"| {name} | {count} |" for name, count in counts(compared).items()]
    lines += ["", "Rows that differ, and our arguments that are not on the page:", ""]
    lines += ["| Argument | Class | Difference | Reason |", "| --- | --- | --- | --- |"]
    for each in compared:
        if each.outcome is not Outcome.AGREE:
            lines.append(f"| `{each.flag}` | {each.outcome.value} | {escape(each.detail)} | {escape(each.reason)} |")
    return text_of(lines)


def _row_flags(row: Row, table: Table) -> str:
    argument = table.argument(row)
    ours = argument.flags if argument is not None else ()
    return "<br>".join(f"`{flag}`" for flag in dict.fromkeys((row.flag, *row.aliases, *ours)))


def _flags(argument: Argument) -> str:
    return "<br>".join(f"`{flag}`" for flag in argument.flags)


def _title(group: str) -> str:
    return group.replace("_", " ").capitalize()
