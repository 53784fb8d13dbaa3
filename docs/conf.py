"""The docs site, made by `make docs`: Sphinx, MyST for Markdown, the Furo theme. Nothing is fetched, neither when it
is built nor when it is read. A broken link is a warning, and `make docs` takes warnings for errors.
"""

from pathlib import Path

from sphinx.application import Sphinx

from srv_matrix.ages import ages_of
from srv_matrix.guides import fill
from srv_matrix.matrix import read_matrix
from srv_matrix.repository import find_repository
from srv_matrix.site import data_files, data_script

DOCS = Path(__file__).parent
WEB = "../support_matrix/srv_matrix/web"

project = "srv"
html_title = "srv"
extensions = ["myst_parser"]
exclude_patterns = ["conf.py"]
myst_heading_anchors = 3  # headings down to ### can be linked: page.md#heading

html_theme = "furo"
html_favicon = "favicon.svg"
html_static_path = ["site.css", f"{WEB}/matrix.css", f"{WEB}/matrix.js"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_use_index = False


def _write_matrix_data(app: Sphinx) -> None:
    """The cells with their ages, for programs, and as a script: a page opened from a disk may not fetch a file."""
    repository = find_repository(DOCS.resolve())
    if repository is None:
        raise FileNotFoundError(f"{DOCS} is not in a checkout of srv, from which the matrix is made")
    matrix = read_matrix(repository)
    data = data_files(matrix, ages_of(matrix.evidence, repository))
    files = {f"support/{name}": text for name, text in data.items()}
    files["_static/matrix-data.js"] = data_script(data["support.json"])
    for name, text in files.items():
        path = Path(app.outdir) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _fill_guide(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the generated parts into a page of the guides."""
    source[0] = fill(source[0], DOCS / "guides")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", _write_matrix_data)
    app.connect("source-read", _fill_guide)
