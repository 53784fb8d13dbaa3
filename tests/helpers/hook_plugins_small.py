"""A complete plugin of hooks as a distribution on disk: the example of docs/hooks.md, which writes what it sees."""

from __future__ import annotations

import re
from pathlib import Path

from platform_plugins import write_plugin

DOCS = Path(__file__).resolve().parents[2] / "docs" / "hooks.md"


def example() -> str:
    """The first Python block of docs/hooks.md."""
    return re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]  # type: ignore[index]


def write_hooks(folder: Path, source: str, name: str = "audit", attribute: str = "Audit") -> None:
    """Write the distribution `srv-<name>`, whose entry point is `attribute` of a module with `source`."""
    write_plugin(folder, name, source, group="srv.hooks", attribute=attribute)
