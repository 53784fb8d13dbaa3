"""The Markdown page of native decoders in quantized checkpoints: methods as columns, and a table for variants that
agree in every cell. Architectures that agree in every method are one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from srv.platform.manifest import Manifest
from srv_matrix.checkpoint_forms import METHODS
from srv_matrix.marks import GENERATED, KEY, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.page_notes import PageNotes, columns, general_reason
from srv_matrix.records import Record
from srv_matrix.weight_methods import method_of

NAME = "quantized.md"
ABOUT = (
    "Native decoders in checkpoints that are quantized by each method. A launch of each was judged, in the forms that "
    "tools write, before weights are read; ◐: not in all of these forms. Which kernels compute is on the page of "
    "[weight formats](weight-formats.md). Cells that were run: log-probabilities were compared with those that "
    "transformers computes with the dequantized weights."
)

_LAYER = re.compile(r"\blayers\.\d+\.")
Cells = Mapping[str, Mapping[tuple[str, str, str], Record]]  # by architecture; by platform, variant and method


def quantized_features(matrix: Matrix) -> Mapping[str, Sequence[Record]]:
    """The records of models in quantized checkpoints, by feature."""
    return {name: records for name, records in matrix.of_kind("model").items() if method_of(name) is not None}


def quantized_page(matrix: Matrix) -> str:
    """The page; nothing but its title if the matrix has no such cells."""
    by_architecture: dict[str, dict[tuple[str, str, str], Record]] = {}
    for feature, records in quantized_features(matrix).items():
        architecture, _, method = feature.removeprefix("model:").partition("/")
        cells = by_architecture.setdefault(architecture, {})
        cells |= {(record.platform, record.variant, method): record for record in records}
    notes = PageNotes(platforms=True)
    lines = [GENERATED, "# Models in quantized checkpoints", "", ABOUT, "", f"{KEY}. [Index](index.md).", ""]
    for manifest in matrix.manifests if by_architecture else ():
        lines += _tables(manifest, by_architecture, notes)
    return text_of([*lines, *notes.lines()])


def _tables(manifest: Manifest, by_architecture: Cells, notes: PageNotes) -> Iterator[str]:
    cells = {
        (manifest.name, variant): [
            _cell(architecture, method, records[manifest.name, variant, method], notes)
            for architecture, records in by_architecture.items()
            for method in METHODS
        ]
        for variant in manifest.variants
    }
    for column in columns(cells):
        yield from (f"## {manifest.name}: {', '.join(column.variants)}", "")
        yield " | ".join(["Architecture", *METHODS])
        yield " | ".join(["---", *[":-:"] * len(METHODS)])
        rows: dict[Sequence[str], list[str]] = {}
        for architecture, texts in zip(by_architecture, _in_rows(column.cells), strict=True):
            rows.setdefault(texts, []).append(f"`{architecture}`")
        for texts, names in rows.items():
            yield " | ".join([", ".join(names), *texts])
        yield ""


def _in_rows(cells: Sequence[str]) -> Iterator[Sequence[str]]:
    return (cells[start : start + len(METHODS)] for start in range(0, len(cells), len(METHODS)))


def _cell(architecture: str, method: str, record: Record, notes: PageNotes) -> str:
    """With the reason without its names, so that those of several cells are one footnote."""
    reason = general_reason(record).replace(architecture, "the model").replace(f"with {method}", "so")
    return notes.cell(record) + notes.footnote(record.reason_code, _LAYER.sub("layers.*.", reason))
