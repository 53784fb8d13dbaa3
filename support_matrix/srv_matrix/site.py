"""The static site: one page that holds the matrix and the script that filters it. No server, nothing fetched.

Its parts are beside this module in `web/`; they are put together here and hold no data of their own.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from srv_matrix.data import to_csv, to_dict, to_json
from srv_matrix.matrix import Matrix


def page(matrix: Matrix) -> str:
    """The whole page as one HTML text."""
    parts = files("srv_matrix") / "web"
    told = json.dumps(to_dict(matrix), ensure_ascii=False, separators=(",", ":"))
    made = (parts / "page.html").read_text(encoding="utf-8")
    for mark, text in (
        ("@STYLE@", (parts / "page.css").read_text(encoding="utf-8")),
        ("@SCRIPT@", (parts / "page.js").read_text(encoding="utf-8")),
        ("@DATA@", told.replace("<", "\\u003c")),  # no text in the data can end its element
    ):
        made = made.replace(mark, text, 1)
    return made


def write_site(matrix: Matrix, folder: Path) -> Path:
    """Write the page and the files for programs beside it; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("index.html", page(matrix)),
        ("support.json", to_json(matrix)),
        ("support.csv", to_csv(matrix)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "index.html"
