"""The Markdown page of what is no argument: models, endpoints, ops, pairs. One row a feature, one column a platform."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from srv.args.config import ARGUMENTS
from srv_matrix.marks import MADE, escape, mark, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.records import Kind, Record

NAME = "features.md"
KINDS: Mapping[Kind, tuple[str, str]] = {
    "model": (
        "Models",
        "Architecture and format of the weights. The first ones have layers of srv's own; the last row is what "
        "transformers alone has.",
    ),
    "endpoint": (
        "Endpoints",
        "The API process answers them: core has them, and no platform speaks of them. What was not run on a platform "
        "has no level, and without device code no server starts.",
    ),
    "op": ("Ops", "The kernels' contracts by type, and whether the platform's package implements them."),
    "pair": (
        "Pairs of arguments",
        "Arguments tied by a law: of core, of the platform, or of a backend asked with an ordinary model, with latent "
        "attention (MLA), with two chunk lengths and with GPT-OSS. Each is taken within the law told. Laws that other "
        "models alone would meet are not listed, nor are defaults that follow from another argument.",
    ),
}


def feature_page(matrix: Matrix) -> str:
    """The page; kinds of which there is no record are left out."""
    lines = [MADE, "# Models, endpoints, ops, pairs", ""]
    lines += ["Marks and levels are those of the [index](index.md).", ""]
    for kind, (title, told) in KINDS.items():
        if found := matrix.of_kind(kind):
            lines += [f"## {title}", "", told, "", *_table(matrix, found), "", *_why(found), ""]
    return text_of(lines)


def _table(matrix: Matrix, found: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    platforms = [manifest.name for manifest in matrix.manifests]
    yield "| | " + " | ".join(platforms) + " |"
    yield "| --- |" + " :---: |" * len(platforms)
    for feature, records in found.items():
        cells = [_cell([each for each in records if each.platform == name]) for name in platforms]
        yield f"| {_named(feature)} | " + " | ".join(cells) + " |"


def _cell(records: Sequence[Record]) -> str:
    """One mark if all variants have the same, else one a variant."""
    marks = {each.variant: mark(each) for each in records}
    if len(set(marks.values())) <= 1:
        return next(iter(marks.values()), "-")
    return "<br>".join(f"{variant}: {told}" for variant, told in marks.items())


def _named(feature: str) -> str:
    kind, _, name = feature.partition(":")
    if kind == "pair":
        return " with ".join(f"`{ARGUMENTS[part].flag}`" for part in name.split("+"))
    return f"`{name}`"


def _why(found: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """A line a reason: the features and places that it holds for."""
    told: dict[tuple[str, str], dict[str, list[str]]] = {}
    for feature, records in found.items():
        for each in records:
            if each.reason:
                places = told.setdefault((each.reason, each.reason_code), {})
                places.setdefault(_named(feature), []).append(f"{each.platform}:{each.variant}")
    if not told:
        return
    everywhere = max(len(records) for records in found.values())
    yield from ("<details><summary>Why</summary>", "")
    for (reason, code), places in told.items():
        shown = [name if len(where) == everywhere else f"{name} ({', '.join(where)})" for name, where in places.items()]
        yield f"- {', '.join(shown)}: {escape(reason)}. `[{code}]`"
    yield from ("", "</details>")
