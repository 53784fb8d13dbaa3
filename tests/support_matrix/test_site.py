"""The filterable page: its contents, and the functions of its script, run in Node."""

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
from every import every
from matrix_world import evidence, matrix

from srv.args.config import ARGUMENTS
from srv.platform.facts import Support
from srv_matrix.ages import Age, Ages
from srv_matrix.data import to_csv, to_json
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
    """The ids, references and scripts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.scripts: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.references += [value for name in ("src", "href") if (value := attributes.get(name))]
        self._tag = tag

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag == "script":
            self.scripts.append(data)


def test_page_is_self_contained_and_has_every_argument(shown: Matrix) -> None:
    read = _Elements()
    read.feed(page(shown))
    assert read.references == ["data:,"]
    assert len(read.ids) == len(set(read.ids))
    data_script, script = read.scripts
    data = json.loads(data_script.removeprefix("const SUPPORT = ").rstrip().removesuffix(";"))
    assert [argument["name"] for argument in data["arguments"]] == list(ARGUMENTS)
    assert data == json.loads(to_json(shown))
    assert set(re.findall(r'\bat\("([\w-]+)"\)', script)) <= set(read.ids)


def test_json_and_csv_have_every_cell(shown: Matrix) -> None:
    lists = [entries for entries in json.loads(to_json(shown)).values() if isinstance(entries, list)]
    entries = [entry for entries in lists for entry in entries]
    groups = [cells for entry in entries for cells in (entry["cells"], *entry.get("values", {}).values())]
    assert sum(len(cell["on"]) for cells in groups for cell in cells) == len(shown.records)
    assert len(to_csv(shown).splitlines()) == len(shown.records) + 1


def test_the_site_is_written(shown: Matrix, tmp_path: Path) -> None:
    assert write_site(shown, tmp_path / "site") == tmp_path / "site" / "index.html"
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["index.html", "support.csv", "support.json"]


def ask(shown: Matrix, expression: str, ages: Ages | None = None) -> Any:
    """The value of a JavaScript expression over the script's functions `m` and the page's data `d`.

    ages: those of evidence, if the page has them.
    """
    script = Path(str(files("srv_matrix") / "web" / "matrix.js"))
    code = (
        f"const m = require({json.dumps(str(script))});"
        'const d = JSON.parse(require("fs").readFileSync(0, "utf8"));'
        f"console.log(JSON.stringify({expression}));"
    )
    assert NODE is not None
    process = subprocess.run(
        [NODE, "-e", code], input=to_json(shown, ages), capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


ROWS = "(s => m.rowsOf(d, s).filter(r => m.rowMatches(r, m.placesOf(d, s), s)).map(r => r.feature))"


@pytest.mark.skipif(NODE is None, reason="Node is not installed; it runs the page's script")
@every(
    ("address", "rows"),
    [
        ("#level=verified&kind=arg&values=1&text=lpm", ["schedule_policy=lpm"]),
        ("#variant=mk2&level=verified&values=1", []),
        ("#text=a+reason&status=unsupported&values=1", ["log_level=debug"]),
        ("#text=LONGEST+--schedule-policy", ["schedule_policy"]),
        ("#platform=nowhere", []),
    ],
)
def test_filters_find_rows(shown: Matrix, address: str, rows: list[str]) -> None:
    assert ask(shown, f"{ROWS}(m.readState({json.dumps(address)}))") == rows


@pytest.mark.skipif(NODE is None, reason="Node is not installed; it runs the page's script")
def test_url_has_the_whole_state(shown: Matrix) -> None:
    address = "#text=page+size&platform=imagined&values=1&cell=page_size%3D32%40imagined%3Amk1"
    assert ask(shown, f"m.writeState(m.readState({json.dumps(address)}))") == address
    assert ask(shown, 'm.writeState(m.readState("#other=1"))') == "#"


@pytest.mark.skipif(NODE is None, reason="Node is not installed; it runs the page's script")
def test_every_list_of_entries_with_cells_has_rows(shown: Matrix) -> None:
    more = '{...d, things: [{name: "one", cells: [{on: ["imagined:mk1"], status: "supported"}]}]}'
    assert ["thing", "thing"] in ask(shown, f"m.kindsOf({more})")
    rows = f'm.rowsOf({more}, m.readState("#kind=thing&values=1"))'
    assert ask(shown, f"{rows}.map(r => [r.feature, Object.keys(r.cells)])") == [["thing:one", ["imagined:mk1"]]]
    others = [record.feature for record in shown.records.values() if record.kind not in ("arg", "value")]
    drawn = ask(shown, 'm.rowsOf(d, m.readState("")).filter(r => r.entry.kind != "arg").map(r => r.feature)')
    assert sorted(drawn) == sorted(set(others))


@pytest.mark.skipif(NODE is None, reason="Node is not installed; it runs the page's script")
def test_only_verified_cells_are_marked_yes(shown: Matrix) -> None:
    texts = ask(
        shown,
        'm.rowsOf(d, {values: "1"}).filter(r => r.entry.name == "schedule_policy" && r.cells["imagined:mk1"])'
        '.map(r => [r.feature, ...m.cellText(r.cells["imagined:mk1"])])',
    )
    assert ["schedule_policy=lpm", "✓ yes", "E4"] in texts
    assert [text for _, text, level in texts if level != "E4" and text.startswith("✓")] == []
    row = 'm.rowsOf(d, {values: "1"}).find(r => r.feature == "schedule_policy=lpm")'
    lines = ask(shown, f'm.evidenceOf(d, {row}.cells["imagined:mk1"])')
    assert "tests/test_it.py::test_it" in lines[0]


@pytest.mark.skipif(NODE is None, reason="Node is not installed; it runs the page's script")
def test_each_cell_is_one_glyph_whose_color_says_what_was_run(shown: Matrix) -> None:
    cells = ask(
        shown,
        'm.rowsOf(d, {values: "1"}).filter(r => r.cells["imagined:mk1"])'
        '.map(r => [r.feature, m.lookOf(d, r.cells["imagined:mk1"])])',
    )
    looks = {feature: (look["glyph"], look["look"]) for feature, look in cells}
    expected = {
        "schedule_policy=lpm": ("✓", "verified"),
        "schedule_policy=fcfs": ("○", "supported"),
        "log_level=debug": ("✕", "unsupported"),
        "log_level": ("◐", "limited"),
        "pp_size": ("…", "planned"),
    }
    assert {feature: looks[feature] for feature in expected} == expected


@pytest.mark.skipif(NODE is None, reason="Node is not installed; it runs the page's script")
def test_old_evidence_is_marked(shown: Matrix) -> None:
    expression = (
        'd.ages && [m.rowsOf(d, {values: "1"}).find(r => r.feature == "schedule_policy=lpm")'
        '.cells["imagined:mk1"]].map(c => [!!c.older, m.evidenceOf(d, c, "imagined:mk1")[0]])[0]'
    )
    for age, text in (
        (Age(30, 10_001), "old: 30 commits and 10001 changed lines ago"),
        (Age(0, 0), "0 commits and 0 ch"),
    ):
        older, line = ask(shown, expression, {("imagined", "c0ffee"): age})
        assert older is age.is_old
        assert text in line


@pytest.mark.skipif(NODE is None, reason="Node is not installed; it runs the page's script")
def test_a_folded_platform_shows_each_sign_once_in_the_color_of_the_weakest(shown: Matrix) -> None:
    row = 'm.rowsOf(d, {values: "1"}).find(r => r.feature == "schedule_policy=lpm")'
    summary = ask(shown, f'm.summaryOf(d, {row}, ["imagined:mk1", "imagined:mk2"], m.readState(""))')
    assert (summary["glyph"], summary["look"], summary["older"]) == ("✓ ○", "supported", False)
    assert summary["text"] == "mk1: ✓ yes E4, mk2: declared E1"
    assert ask(shown, 'm.groupsOf(d, m.readState("#folded=imagined")).map(g => g.folded)') == [True]
    assert ask(shown, '["", "a", "a,b"].map(f => m.toggled(f, "a"))') == ["a", "", "b"]
