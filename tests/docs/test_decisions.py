"""The index of the decisions has each of them once, with its title and its status."""

from __future__ import annotations

import re
from pathlib import Path

from docs_site import DOCS
from every import every

DECISIONS = DOCS / "adr"
HEAD = re.compile(r"# (\d{4}): (.+)\n\nStatus: (.+?)\n\n", re.DOTALL)


def row(file: Path) -> str:
    """What the index must say of a decision."""
    match = HEAD.match(file.read_text(encoding="utf-8"))
    assert match, f"{file.name} does not begin with '# NNNN: title' and 'Status: ...'"
    number, title, status = (" ".join(part.split()) for part in match.groups())
    return f"| [{number}]({file.name}) | {title} | {status} |"


def differences(folder: Path) -> dict[str, list[str]]:
    """Rows that the index of this folder lacks, has without a decision, or has twice."""
    expected = {row(file) for file in folder.glob("[0-9]*.md")}
    rows = [line for line in (folder / "index.md").read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    return {
        "missing": sorted(expected - set(rows)),
        "stale": sorted(set(rows) - expected),
        "twice": sorted({entry for entry in rows if rows.count(entry) > 1}),
    }


def test_the_index_has_every_decision_once() -> None:
    assert differences(DECISIONS) == {"missing": [], "stale": [], "twice": []}


@every(
    ("rows", "fault"),
    [
        ([], "missing"),
        (["| [0001](0001-one.md) | One | proposed. |"], "stale"),
        (["| [0001](0001-one.md) | One | accepted. ADR 0002 replaces it. |"] * 2, "twice"),
    ],
)
def test_a_stale_index_is_found(rows: list[str], fault: str, tmp_path: Path) -> None:
    (tmp_path / "0001-one.md").write_text("# 0001: One\n\nStatus: accepted. ADR 0002\nreplaces it.\n\n## Context\n")
    (tmp_path / "index.md").write_text("\n".join(rows))
    assert differences(tmp_path)[fault]
