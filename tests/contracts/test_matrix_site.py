"""The filterable page: what it holds, and its script's own functions, run by themselves in Node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from matrix_world import evidence, matrix

from srv.args.config import ARGUMENTS
from srv.platform.facts import Support
from srv_matrix.data import to_csv, to_dict, to_json
from srv_matrix.matrix import Matrix
from srv_matrix.site import page, write_site

NODE = shutil.which("node")


@pytest.fixture(scope="module")
def shown() -> Matrix:
    """One declaration with markup in its reason, one cell that was run."""
    return matrix(
        Support("log_level", "unsupported", "a </script><b> in a reason", values=("debug",)),
        evidence=[evidence("schedule_policy=lpm")],
    )


class _Elements(HTMLParser):
    """What a page is made of: ids, labels' inputs, references, open elements."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.data = ""
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.references += [value for name in ("src", "href") if (value := given.get(name))]
        self._in_data = given.get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, data: str) -> None:
        self.data += data if self._in_data else ""


def test_the_page_stands_alone_and_holds_every_argument(shown: Matrix) -> None:
    read = _Elements()
    read.feed(page(shown))
    assert read.references == ["data:,"]
    assert len(read.ids) == len(set(read.ids))
    data = json.loads(read.data)
    assert [each["name"] for each in data["arguments"]] == list(ARGUMENTS)
    assert data == json.loads(json.dumps(to_dict(shown)))
    script = (files("srv_matrix") / "web" / "page.js").read_text(encoding="utf-8")
    assert set(re.findall(r'\bat\("([\w-]+)"\)', script)) <= set(read.ids)


def test_json_and_csv_hold_every_cell(shown: Matrix) -> None:
    arguments = json.loads(to_json(shown))["arguments"]
    places = [place for each in arguments for cell in each["cells"] for place in cell["on"]]
    values = [
        place for each in arguments for cells in each["values"].values() for cell in cells for place in cell["on"]
    ]
    assert len(places) + len(values) == len(shown.records)
    assert len(to_csv(shown).splitlines()) == len(shown.records) + 1


def test_the_site_is_written(shown: Matrix, tmp_path: Path) -> None:
    assert write_site(shown, tmp_path / "site") == tmp_path / "site" / "index.html"
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["index.html", "support.csv", "support.json"]


def ask(shown: Matrix, expression: str) -> Any:
    """The value of a JavaScript expression over the script's functions `m` and the page's data `d`."""
    script = Path(str(files("srv_matrix") / "web" / "page.js"))
    code = (
        f"const m = require({json.dumps(str(script))});"
        'const d = JSON.parse(require("fs").readFileSync(0, "utf8"));'
        f"console.log(JSON.stringify({expression}));"
    )
    assert NODE is not None
    told = json.dumps(to_dict(shown))
    done = subprocess.run([NODE, "-e", code], input=told, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ROWS = "(s => m.rowsOf(d, s).filter(r => m.rowMatches(r, m.placesOf(d, s), s)).map(r => r.feature))"


@pytest.mark.skipif(NODE is None, reason="Node is not installed; with it, the page's script is run")
@pytest.mark.parametrize(
    ("address", "rows"),
    [
        ("#level=verified&values=1", ["schedule_policy", "schedule_policy=lpm"]),
        ("#variant=mk2&level=verified&values=1", []),
        ("#text=a+reason&status=unsupported&values=1", ["log_level=debug"]),
        ("#text=LONGEST+--schedule-policy", ["schedule_policy"]),
        ("#platform=nowhere", []),
    ],
)
def test_filters_find_rows(shown: Matrix, address: str, rows: list[str]) -> None:
    assert ask(shown, f"{ROWS}(m.readState({json.dumps(address)}))") == rows


@pytest.mark.skipif(NODE is None, reason="Node is not installed; with it, the page's script is run")
def test_an_address_says_all_that_is_shown(shown: Matrix) -> None:
    address = "#text=page+size&platform=imagined&values=1&cell=page_size%3D32%40imagined%3Amk1"
    assert ask(shown, f"m.writeState(m.readState({json.dumps(address)}))") == address
    assert ask(shown, 'm.writeState(m.readState("#other=1"))') == "#"


@pytest.mark.skipif(NODE is None, reason="Node is not installed; with it, the page's script is run")
def test_only_what_was_run_reads_as_a_yes(shown: Matrix) -> None:
    texts = ask(
        shown,
        'm.rowsOf(d, {values: "1"}).filter(r => r.argument.name == "schedule_policy" && r.cells["imagined:mk1"])'
        '.map(r => [r.feature, ...m.cellText(r.cells["imagined:mk1"])])',
    )
    assert ["schedule_policy=lpm", "✓ yes", "E4"] in texts
    assert [text for _, text, level in texts if level != "E4" and text.startswith("✓")] == []
    found = 'm.rowsOf(d, {values: "1"}).find(r => r.feature == "schedule_policy=lpm")'
    lines = ask(shown, f'm.evidenceOf(d, {found}.cells["imagined:mk1"])')
    assert "tests/test_it.py::test_it" in lines[0]
