"""The Markdown pages of the matrix by file name: an index, arguments, everything else, and published tables.

Pages depend on committed inputs only, no date, commit or machine but those of evidence; so a page changes only with
declarations and evidence. This module writes no files.
"""

from __future__ import annotations

from srv_matrix.architectures import NAME as ARCHITECTURES
from srv_matrix.architectures import architecture_page
from srv_matrix.argument_page import PLANNED, argument_pages, planned_page
from srv_matrix.checkpoints_page import NAME as CHECKPOINTS
from srv_matrix.checkpoints_page import checkpoints_page
from srv_matrix.diff import Outcome, compare_table, counts
from srv_matrix.feature_pages import feature_pages
from srv_matrix.index_page import index_page
from srv_matrix.marks import GENERATED, escape, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.published import Table
from srv_matrix.quantized_page import NAME as QUANTIZED
from srv_matrix.quantized_page import quantized_features, quantized_page
from srv_matrix.recipes import recipes_page
from srv_matrix.weight_formats import NAME as WEIGHT_FORMATS
from srv_matrix.weight_formats import weight_formats_page


def pages(matrix: Matrix) -> dict[str, str]:
    """Every page by file name."""
    generated = {PLANNED: planned_page()} | feature_pages(matrix)
    for manifest in matrix.manifests:
        generated |= argument_pages(matrix, manifest)
    if formats := weight_formats_page(matrix):
        generated[WEIGHT_FORMATS] = formats
    if quantized_features(matrix):
        generated[QUANTIZED] = quantized_page(matrix)
    if matrix.architectures is not None:
        generated[ARCHITECTURES] = architecture_page(matrix.architectures)
    if matrix.checkpoints:
        generated[CHECKPOINTS] = checkpoints_page(matrix)
    generated |= {f"published-{table.name}.md": published_page(matrix, table) for table in matrix.tables}
    generated |= {f"recipes-{recipe.name}.md": recipes_page(recipe) for recipe in matrix.recipes}
    return generated | {"index.md": index_page(matrix, generated)}


def published_page(matrix: Matrix, table: Table) -> str:
    """The comparison of a published table with the declarations of our platform."""
    compared = compare_table(matrix, table)
    lines = [GENERATED, f"# {table.title}: compared", ""]
    lines += [f"{len(table.rows)} rows, compared with the declarations of platform `{table.platform}`.", ""]
    lines += ["| Class | Rows |", "| --- | ---: |"]
    lines += [f"| {name} | {count} |" for name, count in counts(compared).items()]
    lines += ["", "Rows that differ, and our arguments that are not on the page:", ""]
    lines += ["| Argument | Class | Difference | Reason |", "| --- | --- | --- | --- |"]
    for row in compared:
        if row.outcome is not Outcome.AGREE:
            lines.append(f"| `{row.flag}` | {row.outcome.value} | {escape(row.detail)} | {escape(row.reason)} |")
    return text_of(lines)
