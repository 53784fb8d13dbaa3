"""The files of the docs site: it builds without warnings, has no broken links, and loads nothing from other sites."""

from __future__ import annotations

import importlib.util
import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from docs_site import DOCS, build_docs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sphinx") is None and not os.environ.get("CI"),
        reason="Sphinx is not installed; `make env` installs it",
    ),
]
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}  # what a browser fetches


class Page(HTMLParser):
    """The anchors of a page, its links, and the resources that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" and "href" in given else []
        if LOADS.get(tag, "") in given and (tag != "link" or given["rel"] in ("stylesheet", "icon")):
            self.loads.append(given[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    done = build_docs(DOCS, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_document_is_a_page_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    texts = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    assert {
        "flow.html",
        "CONTRIBUTING.html",
        "matrix.html",
        "support/npu.html",
        "adr/0001-platform-contract.html",
    } <= texts
    linked = {unquote(urlsplit(link).path) for link in pages[site / "index.html"].links}
    assert texts - {"index.html"} <= linked
    assert "srv serves large language models" in _words(site / "index.html")


def test_no_link_is_broken(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "search.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else []
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 100


def test_nothing_is_loaded_from_other_sites(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for address in page.loads:
            parts = urlsplit(address)
            assert not parts.scheme, f"{path.name} loads {address}"
            assert not parts.netloc, f"{path.name} loads {address}"
            assert (path.parent / parts.path).is_file(), f"{path.name} loads {address}, which does not exist"
    for path in site.rglob("*.css"):
        assert "url(http" not in path.read_text(encoding="utf-8"), path.name


def test_matrix_page_has_the_committed_cells(site: Path, pages: dict[Path, Page]) -> None:
    page = pages[site / "matrix.html"]
    assert len(page.anchors) == len(set(page.anchors))
    script = (site / "_static" / "matrix-data.js").read_text(encoding="utf-8")
    data = script.removeprefix("const SUPPORT = ").rstrip().removesuffix(";")
    shown = json.loads(data)
    shown.pop("ages")  # ages depend on the history, so the committed file does not have them
    committed = json.loads((DOCS / "support" / "support.json").read_text(encoding="utf-8"))
    for support in (shown, committed):
        for entry in (*support["arguments"], *support["features"]):
            entry["cells"] = _cells_by_variant(entry["cells"])
            entry["values"] = {value: _cells_by_variant(cells) for value, cells in entry.get("values", {}).items()}
    assert shown == committed


def _cells_by_variant(cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The cells without their ages, which divide variants that are one group in the committed file."""
    left_out = ("on", "older")
    return {on: {key: cell[key] for key in cell if key not in left_out} for cell in cells for on in cell["on"]}


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "index.md").write_text("# One\n\n[gone](elsewhere.md) [here](#one)\n", encoding="utf-8")
    done = build_docs(tmp_path / "in", tmp_path / "site")
    assert done.returncode != 0
    assert "index.md:3" in done.stderr
    assert "elsewhere.md" in done.stderr
    assert "#one" not in done.stderr


def _words(path: Path) -> str:
    texts: list[str] = []
    parser = HTMLParser()
    parser.handle_data = texts.append  # type: ignore[method-assign]
    parser.feed(path.read_text(encoding="utf-8"))
    return " ".join("".join(texts).split())
