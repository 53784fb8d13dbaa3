"""CONTRIBUTING.md says for each package where its tests are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `([^` ]+)` \| (`.+) \|$", re.MULTILINE)


def test_the_table_of_tests_has_every_package_and_only_existing_paths() -> None:
    rows = dict(ROW.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    folders = [
        path
        for parent in ("core/srv", "platforms", "plugins")
        for path in (ROOT / parent).iterdir()
        if path.is_dir() and next(path.rglob("*.py*"), None) and path.name != "__pycache__"
    ]
    expected = {path.relative_to(ROOT).as_posix() for path in folders} | {"kernels", "support_matrix", "ci", "docs"}
    assert expected - rows.keys() == set()
    paths = [*rows, *(path for tests in rows.values() for path in re.findall(r"`([^`]+)`", tests))]
    assert [path for path in paths if not (ROOT / path).exists()] == []
