"""Shared code has no switch between the algorithms that propose drafts."""

from __future__ import annotations

from pathlib import Path

from every import every
from named_strings import names_in

from srv.speculative.planned import PLANNED
from srv.speculative.registry import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
SHARED = [
    path
    for folder in ("args", "engine", "executor", "planning", "sched", "worker")
    for path in sorted((ROOT / "core" / "srv" / folder).rglob("*.py"))
]


@every("path", SHARED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shared_code_names_no_algorithm(path: Path) -> None:
    assert names_in(path.read_text(encoding="utf-8"), {*BUILT_IN, *PLANNED}) == []
