"""The files of the docs site: it builds without warnings, has no broken links, and loads nothing from other sites."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
from html.parser import HTMLParser
from pathlib import Path
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
        attributes = {name: value for name, value in attrs if value}
        self.anchors += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if tag == "a" and "href" in attributes else []
        if LOADS.get(tag, "") in attributes and (tag != "link" or attributes["rel"] in ("stylesheet", "icon")):
            self.loads.append(attributes[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    process = build_docs(DOCS, out)
    assert process.returncode == 0, process.stderr
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


def test_the_matrix_page_and_its_files_have_the_same_cells(site: Path, pages: dict[Path, Page]) -> None:
    """The files for programs are made with the site, and linked."""
    page = pages[site / "matrix.html"]
    assert len(page.anchors) == len(set(page.anchors))
    assert {"support/support.json", "support/support.csv"} <= set(page.links)
    script = (site / "_static" / "matrix-data.js").read_text(encoding="utf-8")
    data = json.loads(script.removeprefix("const SUPPORT = ").rstrip().removesuffix(";"))
    assert data == json.loads((site / "support" / "support.json").read_text(encoding="utf-8"))
    assert data["ages"]
    entries = [*data["arguments"], *data["features"]]
    groups = [cells for entry in entries for cells in (entry["cells"], *entry.get("values", {}).values())]
    with (site / "support" / "support.csv").open(encoding="utf-8", newline="") as file:
        lines = {(row["feature"], f"{row['platform']}:{row['variant']}") for row in csv.DictReader(file)}
    assert sum(len(cell["on"]) for cells in groups for cell in cells) == len(lines)


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "index.md").write_text("# One\n\n[gone](elsewhere.md) [here](#one)\n", encoding="utf-8")
    process = build_docs(tmp_path / "in", tmp_path / "site")
    assert process.returncode != 0
    assert "index.md:3" in process.stderr
    assert "elsewhere.md" in process.stderr
    assert "#one" not in process.stderr


def _words(path: Path) -> str:
    texts: list[str] = []
    parser = HTMLParser()
    parser.handle_data = texts.append  # type: ignore[method-assign]
    parser.feed(path.read_text(encoding="utf-8"))
    return " ".join("".join(texts).split())
