"""The filterable page: one table of all cells, with a script and a style. It needs no server and fetches nothing.

Its parts are in `web/` next to this module and contain no data. The docs site (`docs/matrix.md`, `docs/conf.py`) has
them on one of its pages; `write_site` combines them into one self-contained file. This module must not know how the
docs site is built or how a cell is judged.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from srv_matrix.ages import Ages
from srv_matrix.data import to_csv, to_json
from srv_matrix.matrix import Matrix


def data_script(data: str) -> str:
    """The script that defines the data of the page. `data`: the JSON of `srv_matrix.data.to_json`."""
    return (
        "const SUPPORT = " + data.strip().replace("<", "\\u003c") + ";\n"
    )  # so that no text can close the script element


def page(matrix: Matrix, ages: Ages | None = None) -> str:
    """The self-contained page, as one HTML text. `ages`: those of evidence, if they are known."""
    parts = files("srv_matrix") / "web"
    html = (parts / "alone.html").read_text(encoding="utf-8").replace("@TITLE@", _title(matrix))
    for mark, text in (
        ("@STYLE@", (parts / "matrix.css").read_text(encoding="utf-8")),
        ("@BODY@", (parts / "matrix.html").read_text(encoding="utf-8")),
        ("@SCRIPT@", (parts / "matrix.js").read_text(encoding="utf-8")),
        ("@DATA@", data_script(to_json(matrix, ages))),
    ):
        html = html.replace(mark, text, 1)
    return html


def _title(matrix: Matrix) -> str:
    """The page of one plugin is named after its platform; its runs name the products."""
    names = [manifest.name for manifest in matrix.manifests]
    return f"What works on {names[0]}" if len(names) == 1 else "What works where"


def write_site(matrix: Matrix, folder: Path, ages: Ages | None = None) -> Path:
    """Write the self-contained page and the files for programs; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"index.html": page(matrix, ages), **data_files(matrix, ages)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "index.html"


def data_files(matrix: Matrix, ages: Ages | None = None) -> dict[str, str]:
    """The cells for programs, by file name."""
    return {"support.json": to_json(matrix, ages), "support.csv": to_csv(matrix)}
