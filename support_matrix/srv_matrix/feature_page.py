"""The Markdown page of models, weight formats, endpoints, ops and pairs of arguments: a row per feature, a column per
platform."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from srv.args.config import ARGUMENTS
from srv_matrix import weight_formats
from srv_matrix.marks import GENERATED, escape, mark, per_variant, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.records import Kind, Record
from srv_matrix.weight_methods import method_of

NAME = "features.md"
KINDS: Mapping[Kind, tuple[str, str]] = {
    "model": (
        "Models",
        "Architecture and file format. The first rows are implemented in srv; the last row stands for all other "
        "architectures, which transformers implements. [Another page](weights.md) has quantized checkpoints.",
    ),
    "endpoint": (
        "Endpoints",
        "The API process implements them in core, independently of the platform. An endpoint that was not run on a "
        "platform has no level, and on a platform without device code no server starts.",
    ),
    "op": ("Ops", "The ops of the kernel contracts by dtype, and whether the platform's package implements them."),
    "pair": (
        "Pairs of arguments",
        "Arguments whose valid values depend on each other, by a constraint of core, of the platform, or of a backend. "
        "Backends are checked with a common model, with latent attention (MLA), with dual chunk attention and with "
        "GPT-OSS. Constraints that apply only to other models are not listed, nor are defaults that depend on another "
        "argument.",
    ),
}


def feature_page(matrix: Matrix) -> str:
    """The page; kinds without records are left out."""
    lines = [GENERATED, "# Models, weight formats, endpoints, ops, pairs", ""]
    lines += ["Marks and levels are those of the [index](index.md).", ""]
    for kind, (title, description) in KINDS.items():
        found = {name: records for name, records in matrix.of_kind(kind).items() if method_of(name) is None}
        if found:
            lines += [f"## {title}", "", description, "", *_table(matrix, found), "", *_reasons(found), ""]
        if kind == "model" and (table := list(weight_formats.weight_formats(matrix))):
            lines += ["## Weight formats", "", weight_formats.DESCRIPTION, "", *table, ""]
    return text_of(lines)


def _table(matrix: Matrix, found: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    platforms = [manifest.name for manifest in matrix.manifests]
    yield "| | " + " | ".join(platforms) + " |"
    yield "| --- |" + " :---: |" * len(platforms)
    for feature, records in found.items():
        cells = [_cell([each for each in records if each.platform == name]) for name in platforms]
        yield f"| {_feature_name(feature)} | " + " | ".join(cells) + " |"


def _cell(records: Sequence[Record]) -> str:
    return per_variant({each.variant: mark(each) for each in records})


def _feature_name(feature: str) -> str:
    kind, _, name = feature.partition(":")
    if kind == "pair":
        return " with ".join(f"`{ARGUMENTS[part].flag}`" for part in name.split("+"))
    return f"`{name}`"


def _without_names(record: Record) -> str:
    """The reason without its variant, and without its model's class, so that those of several are one line.

    The line lists both.
    """
    reason = re.sub(rf", not {re.escape(record.variant)}\b", "", record.reason)
    kind, _, name = record.feature.partition(":")
    return re.sub(rf"\b{re.escape(name.split('/')[0])}\b", "the model", reason) if kind == "model" else reason


def _reasons(found: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """One line per reason, with the features and variants that it applies to."""
    by_reason: dict[tuple[str, str], dict[str, list[str]]] = {}
    for feature, records in found.items():
        for each in records:
            if each.reason:
                variants = by_reason.setdefault((_without_names(each), each.reason_code), {})
                variants.setdefault(_feature_name(feature), []).append(f"{each.platform}:{each.variant}")
    if not by_reason:
        return
    all_variants = max(len(records) for records in found.values())
    yield from ("<details><summary>Reasons</summary>", "")
    for (reason, code), variants in by_reason.items():
        shown = [name if len(on) == all_variants else f"{name} ({', '.join(on)})" for name, on in variants.items()]
        yield f"- {', '.join(shown)}: {escape(reason)}. `[{code}]`"
    yield from ("", "</details>")
