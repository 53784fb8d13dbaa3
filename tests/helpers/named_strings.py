"""Names among the strings of a source file, for tests that shared code has no switch between things of one kind."""

from __future__ import annotations

import ast
from collections.abc import Collection


def names_in(source: str, names: Collection[str]) -> list[str]:
    """Those of the names that are strings of a file; docstrings may have them."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [str(node.value) for node in strings if id(node) not in prose and node.value in names]
