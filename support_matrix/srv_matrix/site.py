"""The filterable page: one table of all cells, a script and a style. No server, nothing fetched.

Its parts lie beside this module in `web/` and hold no data. The docs site (`docs/matrix.md`, `docs/conf.py`) shows
them as one of its pages; `write_site` puts them together into one file that stands alone. This module knows neither
how the docs site is built nor how a cell is judged.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from srv_matrix.data import to_csv, to_json
from srv_matrix.matrix import Matrix


def data_script(told: str) -> str:
    """The script that gives the page its data. `told`: the JSON of `srv_matrix.data.to_json`."""
    return "const SUPPORT = " + told.strip().replace("<", "\\u003c") + ";\n"  # no text in it can end its element


def page(matrix: Matrix) -> str:
    """The page that stands alone, as one HTML text."""
    parts = files("srv_matrix") / "web"
    made = (parts / "alone.html").read_text(encoding="utf-8")
    for mark, text in (
        ("@STYLE@", (parts / "matrix.css").read_text(encoding="utf-8")),
        ("@BODY@", (parts / "matrix.html").read_text(encoding="utf-8")),
        ("@SCRIPT@", (parts / "matrix.js").read_text(encoding="utf-8")),
        ("@DATA@", data_script(to_json(matrix))),
    ):
        made = made.replace(mark, text, 1)
    return made


def write_site(matrix: Matrix, folder: Path) -> Path:
    """Write the page that stands alone and the files for programs beside it; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("index.html", page(matrix)),
        ("support.json", to_json(matrix)),
        ("support.csv", to_csv(matrix)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "index.html"
