"""The Markdown page of native decoders in quantized checkpoints: a table per platform, methods as columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from srv.platform.manifest import Manifest
from srv_matrix.checkpoint_forms import METHODS
from srv_matrix.marks import GENERATED, escape, mark, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.records import Record
from srv_matrix.weight_methods import method_of

NAME = "weights.md"
ABOUT = (
    "Native decoders in checkpoints that are quantized by each method. A launch of each was judged, in the forms that "
    'tools write, before weights are read; "partly": not in all of these forms. Which kernels compute is in the table '
    "of [weight formats](features.md). Cells with a level above E1 were also run: log-probabilities were compared with "
    "those that transformers computes with the dequantized weights. Marks and levels are those of the "
    "[index](index.md)."
)

_LAYER = re.compile(r"\blayers\.\d+\.")


def weight_methods_page(matrix: Matrix) -> str:
    """The page; nothing but its title if the matrix has no such cells."""
    found: dict[str, dict[str, Sequence[Record]]] = {}
    for feature, records in matrix.of_kind("model").items():
        if (method := method_of(feature)) is not None:
            found.setdefault(_architecture(feature), {})[method] = records
    lines = [GENERATED, "# Models by weight format", "", ABOUT, ""]
    for manifest in matrix.manifests if found else ():
        lines += [f"## {manifest.name}", "", *_table(manifest, found), "", *_reasons(manifest, found), ""]
    return text_of(lines)


def _architecture(feature: str) -> str:
    return feature.removeprefix("model:").partition("/")[0]


def _table(manifest: Manifest, found: Mapping[str, Mapping[str, Sequence[Record]]]) -> Iterator[str]:
    yield "| | " + " | ".join(METHODS) + " |"
    yield "| --- |" + " :---: |" * len(METHODS)
    for architecture, by_method in found.items():
        cells = [_cell([each for each in by_method[method] if each.platform == manifest.name]) for method in METHODS]
        yield f"| `{architecture}` | " + " | ".join(cells) + " |"


def _cell(records: Sequence[Record]) -> str:
    """Each mark once, with the variants that it is for, if they differ."""
    variants: dict[str, list[str]] = {}
    for each in records:
        variants.setdefault(mark(each), []).append(each.variant)
    if len(variants) == 1:
        return next(iter(variants))
    return "<br>".join(f"{', '.join(names)}: {text}" for text, names in variants.items())


def _reasons(manifest: Manifest, found: Mapping[str, Mapping[str, Sequence[Record]]]) -> Iterator[str]:
    """One line per reason, with the architectures and methods that it applies to."""
    by_reason: dict[tuple[str, str], dict[str, list[str]]] = {}
    for architecture, by_method in found.items():
        for method, records in by_method.items():
            own = (each for each in records if each.platform == manifest.name and each.reason)
            for key in dict.fromkeys((_general(each, architecture, method), each.reason_code) for each in own):
                by_reason.setdefault(key, {}).setdefault(method, []).append(architecture)
    if not by_reason:
        return
    yield from ("<details><summary>Reasons</summary>", "")
    for (reason, code), methods in by_reason.items():
        shown = [f"{method} of {_names(architectures, len(found))}" for method, architectures in methods.items()]
        yield f"- {'; '.join(shown)}: {escape(reason)}. `[{code}]`"
    yield from ("", "</details>")


def _names(architectures: Sequence[str], total: int) -> str:
    return "all" if len(architectures) == total else ", ".join(f"`{name}`" for name in architectures)


def _general(record: Record, architecture: str, method: str) -> str:
    """The reason without its names, so that those of several cells are one line; the line lists them."""
    text = record.reason.replace(architecture, "the model").replace(f"with {method}", "so")
    return _LAYER.sub("layers.*.", text.replace(f", not {record.variant}", ""))
