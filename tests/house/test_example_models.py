"""The package in tests/packages uses only what the pages of docs/ about extensions declare as public."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    ROOT / "docs" / name for name in ("architectures.md", "quantization.md", "logit-processors.md", "reply-formats.md")
)
SOURCES = sorted((ROOT / "tests" / "packages").rglob("*.py"))
ROW = re.compile(r"^\| `(srv\.[\w.]+)` \| (`.+`) \|$", re.MULTILINE)


def public() -> set[tuple[str, str]]:
    rows = [row for page in PAGES for row in ROW.findall(page.read_text(encoding="utf-8"))]
    return {(module, name) for module, names in rows for name in re.findall(r"`(\w+)`", names)}


def imported(source: str) -> set[tuple[str, str]]:
    """(module, name) of everything that a source imports from `srv`; the name is "" for a whole module."""
    imports: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "srv":
            imports |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "srv"}
    return imports


def test_the_package_imports_only_what_the_pages_list() -> None:
    assert imported("import srv.specs, torch\nfrom srv.a import _b") == {("srv.specs", ""), ("srv.a", "_b")}
    used = set().union(*(imported(path.read_text(encoding="utf-8")) for path in SOURCES))
    assert len(used) > 15
    assert used - public() == set()


def test_what_the_pages_list_exists() -> None:
    missing = [
        (module, name) for module, name in sorted(public()) if not hasattr(importlib.import_module(module), name)
    ]
    assert missing == []
