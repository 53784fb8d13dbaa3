"""The docs site, made by `make docs`: Sphinx, MyST for Markdown, the Furo theme. Nothing is fetched, neither when it
is built nor when it is read. A broken link is a warning, and `make docs` takes warnings for errors.
"""

from pathlib import Path

from sphinx.application import Sphinx

from srv_matrix.site import data_script

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
    """The committed cells as a script, since a page opened from a disk may not fetch a file."""
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    cells = (DOCS / "support" / "support.json").read_text(encoding="utf-8")
    (folder / "matrix-data.js").write_text(data_script(cells), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", _write_matrix_data)
