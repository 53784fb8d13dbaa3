"""The table at the top of pages: the variants of platforms as products, and the newest run that there is of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from srv.platform.manifest import Manifest
from srv_matrix.marks import escape
from srv_matrix.matrix import Matrix
from srv_matrix.page_notes import run_name, versions_of
from srv_matrix.records import Evidence

_COLUMNS = ("Variant", "Product", "Last run", "Date", "Device", "Versions")


def variants_table(matrix: Matrix, manifests: Sequence[Manifest], *, platforms: bool = False) -> Iterator[str]:
    """Its lines. `platforms`: with a column for them, which link to their pages."""
    head = (["Platform"] if platforms else []) + list(_COLUMNS)
    yield " | ".join(head)
    yield " | ".join(["---"] * len(head))
    newest = _newest(matrix)
    for manifest in manifests:
        for variant in manifest.variants:
            linked = [f"[{manifest.name}]({manifest.name}.md)"] if platforms else []
            product = manifest.facts.profiles[variant].name
            texts = [variant, product, *_run(newest.get((manifest.name, variant)))]
            yield " | ".join([*linked, *(escape(text) or "-" for text in texts)])


def _newest(matrix: Matrix) -> dict[tuple[str, str], Evidence]:
    """The newest passed run by platform and variant: on a device of it, or if there is none, with its path forced."""
    newest: dict[tuple[str, str], Evidence] = {}
    for line in sorted(matrix.evidence, key=lambda line: (not line.forced, line.date, line.commit, line.test)):
        if line.passed:
            newest[line.platform, line.variant] = line
    return newest


def _run(evidence: Evidence | None) -> tuple[str, str, str, str]:
    if evidence is None:
        return "none", "", "", ""
    return run_name(evidence), evidence.date, evidence.device, versions_of(evidence)
