"""The Markdown index of the support pages: what was run where, the meaning of signs and levels, and the other pages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

from srv_matrix.architectures import NAME as ARCHITECTURES
from srv_matrix.argument_page import PLANNED
from srv_matrix.checkpoints_page import NAME as CHECKPOINTS
from srv_matrix.counts import Counts
from srv_matrix.feature_pages import KINDS, features_of, page_name
from srv_matrix.marks import GENERATED, LEGEND, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.quantized_page import NAME as QUANTIZED
from srv_matrix.quantized_page import quantized_features
from srv_matrix.records import LEVELS, Record
from srv_matrix.variants_table import variants_table
from srv_matrix.weight_formats import NAME as WEIGHT_FORMATS

_ABOUT = (
    "Each cell combines two facts, what the platform declares and what core implements, and shows the lower one. "
    "What is accepted is accepted by the rules of a launch; whether it was ever run, and on what, is counted here and "
    "shown in each cell: a ✓ is a test that passed on this variant. Numbers such as e1 name the commit and day of a "
    "run, at the end of each page."
)
_FILES = {
    page_name("pair"): "Pairs of arguments: whose valid values depend on each other.",
    PLANNED: "Planned arguments: what core implements on no platform yet, and why a launch refuses it.",
    QUANTIZED: "Models in quantized checkpoints: each native decoder in each quantization method.",
    WEIGHT_FORMATS: "Weight formats: with which kernels a platform computes with the weights of a method.",
    ARCHITECTURES: "Architectures: every causal class of transformers, served or refused with its reason.",
    CHECKPOINTS: "Published models: checkpoints that people run, their sizes, and a plan for each on each platform.",
}


_COUNTED = (  # as in Counts
    "✓ run on the device",
    "✓ code path forced on a newer device",
    "◎ simulated, compiled or started",
    "○ accepted, not run",
    "refused",
)


def index_page(matrix: Matrix, others: Collection[str]) -> str:
    """The page. `others`: the file names of all other pages."""
    lines = [GENERATED, "# What works where", "", _ABOUT, ""]
    lines += ["## Products", "", *variants_table(matrix, matrix.manifests, platforms=True), ""]
    for title, page, records in _selections(matrix):
        if records:
            heading = f"[{title}]({page})" if page else title
            lines += [f"## {heading}", "", *_counts_table(matrix, records), ""]
    lines += ["## Signs", "", "Sign | Meaning", ":-: | ---"]
    lines += [f"{sign.look.glyph} | {sign.meaning}" for sign in LEGEND]
    lines += ["", "## Levels", "", "Level | Meaning", "--- | ---", "none | nothing is declared for this platform"]
    lines += [f"{level.name} | {meaning}" for level, meaning in LEVELS.items()]
    lines += ["", *(["## Evidence", "", *(f"- {run}" for run in matrix.runs), ""] if matrix.runs else [])]
    lines += ["## Files", "", *_files(matrix, others)]
    return text_of(lines)


def _selections(matrix: Matrix) -> Iterator[tuple[str, str, list[Record]]]:
    """What is counted: a title, its page, and its records. Pairs of arguments are not run as such."""
    yield "Arguments", "", _all(matrix.of_kind("arg"))
    for kind in ("model", "op", "endpoint"):
        yield KINDS[kind].title, page_name(kind), _all(features_of(matrix, kind))
    yield "Models in quantized checkpoints", QUANTIZED, _all(quantized_features(matrix))


def _all(features: Mapping[str, Sequence[Record]]) -> list[Record]:
    return list(chain.from_iterable(features.values()))


def _counts_table(matrix: Matrix, records: Sequence[Record]) -> Iterator[str]:
    by_place: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        by_place.setdefault((record.platform, record.variant), []).append(record)
    yield " | ".join(["Platform", "Variant", *_COUNTED, "of"])
    yield " | ".join(["---", "---", *["---:"] * len(_COUNTED), "---:"])
    for manifest in matrix.manifests:
        for variant in manifest.variants:
            counted = Counts.of(by_place.get((manifest.name, variant), ()))
            yield f"[{manifest.name}]({manifest.name}.md) | {variant} | " + " | ".join(
                map(str, (*counted, sum(counted)))
            )


def _files(matrix: Matrix, others: Collection[str]) -> Iterator[str]:
    for name, line in _FILES.items():
        if name in others:
            title, _, about = line.partition(": ")
            yield f"- [{title}]({name}): {about}"
    for table in matrix.tables:
        yield f"- [{table.title}](published-{table.name}.md): compared with our declarations, row by row."
    for recipes in matrix.recipes:
        yield f"- [{recipes.title}](recipes-{recipes.name}.md): which published command lines a launch accepts."
    yield "- `srv matrix site --out FOLDER` writes the same cells as `support.json` and `support.csv`, for programs."
