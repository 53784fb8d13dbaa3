"""The generated parts of the guides: arguments, refusal codes, other engines' flags, endpoints.

A page of the docs has a line `<!-- generated: NAME -->`, which `fill` replaces by Markdown when the site is built.
So these parts are never older than the code, and nothing generated is committed. This module must not know Sphinx.
"""

from __future__ import annotations

import re
from pathlib import Path

from srv_matrix.guides.arguments import arguments
from srv_matrix.guides.endpoints import endpoints
from srv_matrix.guides.flags import flags
from srv_matrix.guides.refusals import refusals
from srv_matrix.repository import MatrixError

__all__ = ["fill"]

_MARK = re.compile(r"^<!-- generated: (?P<name>[a-z]+)(?: (?P<of>[a-z-]+))? -->$", re.MULTILINE)


def fill(page: str, folder: Path) -> str:
    """`page` with its generated parts. `folder`: of the guides, with refusals.toml and examples.toml."""
    return _MARK.sub(lambda mark: _part(mark["name"], mark["of"] or "", folder), page)


def _part(name: str, of: str, folder: Path) -> str:
    if name == "arguments":
        return arguments()
    if name == "flags":
        return flags(of)
    if name == "refusals":
        return refusals(folder / "refusals.toml")
    if name == "endpoints":
        return endpoints(folder / "examples.toml")
    raise MatrixError(f"no part of the guides is called {name}. Use arguments, flags, refusals or endpoints")
