"""The docs site in headless Chromium: filters, cells by mouse and keyboard, links, phones, colors, empty console.

The expected contents are computed from the site's support.json, not with the page's script.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from docs_site import DOCS, build_docs, served
from every import every
from matrix_world import evidence, matrix

from srv_matrix.data import to_json
from srv_matrix.matrix import Matrix
from srv_matrix.site import data_script, write_site

if TYPE_CHECKING:
    from site_browser import Browser

pytestmark = [pytest.mark.proof(minutes=0.1), pytest.mark.xdist_group("site")]
DATA: dict[str, Any] = {}  # support.json, once the site is built
CELL = "model_impl@npu:a2"
PHONE = (390, 844)
DESKTOP = (1440, 900)
LAPTOP = (1280, 800)
FURTHER = {
    "others": [
        {
            "name": "endpoint:POST /v1/chat/completions",
            "kind": "endpoint",
            "help": "Chat.",
            "cells": [{"on": ["imagined:mk1"], "status": "supported", "declared": "supported", "core": "supported"}],
        },
        {"feature": "rotate(bfloat16)", "kind": "op", "cells": [{"on": ["imagined:mk2"], "status": "odd"}]},
    ]
}


def missing() -> list[str]:
    """Installation commands for everything that these tests need and this machine does not have."""
    programs = {"chromium": "chromium", "chromedriver": "chromium-driver"}
    packages = [package for program, package in programs.items() if shutil.which(program) is None]
    modules = [name for name in ("selenium", "sphinx") if importlib.util.find_spec(name) is None]
    return [f"apt-get install {' '.join(packages)}"] * bool(packages) + ["make env"] * bool(modules)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The docs site; self-contained pages with further kinds of records (alone/) and of a plugin's report (report/)."""
    if lacks := missing():
        reason = f"there is no browser to test the site in; run {' and '.join(lacks)}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    out = tmp_path_factory.mktemp("docs") / "site"
    process = build_docs(DOCS, out)
    assert process.returncode == 0, process.stderr
    DATA.update(json.loads((out / "support" / "support.json").read_text(encoding="utf-8")))
    small = matrix(evidence=[evidence("schedule_policy=lpm")])
    page = write_site(small, out / "alone")
    data = to_json(small)
    more = json.dumps(json.loads(data) | FURTHER, ensure_ascii=False)
    page.write_text(page.read_text(encoding="utf-8").replace(data_script(data), data_script(more)), encoding="utf-8")
    write_site(of_report(), out / "report")
    return out


def of_report() -> Matrix:
    """The matrix of a plugin whose profiles name products, with evidence of a conformance report."""
    reported = matrix(evidence=[evidence("schedule_policy=lpm", commit="", test="srv conformance: engine.greedy")])
    (manifest,) = reported.manifests
    named = {
        variant: replace(profile, name=f"Imagined {variant}") for variant, profile in manifest.facts.profiles.items()
    }
    return replace(reported, manifests=(replace(manifest, facts=replace(manifest.facts, profiles=named)),))


@pytest.fixture(scope="module")
def window(site: Path) -> Iterator[Browser]:
    from site_browser import Browser  # needs selenium, which `site` has checked

    with served(site) as address:
        browser = Browser(address)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """A desktop window with light colors, whose console must remain empty."""
    window.emulate()
    window.console()
    yield window
    assert window.console() == []


def entries() -> list[dict[str, Any]]:
    return [*DATA["arguments"], *DATA["features"]]


def rows(**wanted: str) -> list[str]:
    """The titles of rows with a matching cell, by support.json."""
    names = []
    for entry in entries():
        cells = [(place.split(":"), cell) for cell in entry["cells"] for place in cell["on"]]
        if entry.get("kind", "arg") == wanted.get("kind", entry.get("kind", "arg")) and any(
            platform == wanted.get("platform", platform)
            and variant == wanted.get("variant", variant)
            and cell["status"] == wanted.get("status", cell["status"])
            and cell.get("level", "none") == wanted.get("level", cell.get("level", "none"))
            for (platform, variant), cell in cells
        ):
            names.append(entry["flags"][0] if "flags" in entry else entry["name"])
    return names


def shown(browser: Browser) -> list[str]:
    """The first line of each row's title."""
    return [text.splitlines()[0] for text in browser.texts("#matrix tbody th")]


def fragment(**state: str) -> str:
    return "matrix.html#" + urlencode(state)


@every(
    "wanted",
    [
        {},
        {"platform": "npu"},
        {"kind": "arg", "platform": "rocm"},
        {"platform": "npu", "variant": "a3"},
        {"status": "not_applicable"},
        {"level": "E1", "platform": "cuda"},
        {"level": "none", "status": "planned", "platform": "cpu", "variant": "neon"},
        {"platform": "npu", "variant": "a2", "status": "unsupported", "level": "E1"},
    ],
    ids=lambda wanted: " ".join(wanted.values()) or "all",
)
def test_each_filter_finds_its_rows(browser: Browser, wanted: dict[str, str]) -> None:
    browser.open("matrix.html")
    for name, value in wanted.items():
        browser.choose(f"#{name}", value)
    expected = rows(**wanted)
    assert shown(browser) == expected
    assert expected
    assert browser.find("#count").text.startswith(f"{len(expected)} rows")
    platforms = [text.removeprefix("▾ ") for text in browser.texts("#matrix thead th.platform")]
    assert set(platforms) == {wanted.get("platform", name) for name in DATA["platforms"]}
    variants = browser.texts("#matrix thead th.variant")
    assert set(variants) <= {wanted.get("variant", variant) for variant in variants}


def test_free_text_finds_names_and_reasons_and_clear_removes_it(browser: Browser) -> None:
    browser.open("matrix.html")
    browser.find("#text").send_keys("--PAGE-size")
    assert shown(browser) == ["--page-size"]
    browser.find("#text").send_keys(" nowhere")
    assert browser.find("#count").text == "Nothing matches these filters. Clear removes them."
    browser.click('#filters [type="reset"]')
    assert len(shown(browser)) == len(entries())
    assert browser.path == "matrix.html"
    browser.find("#text").send_keys("models of the transformers library are published")
    assert "--model-impl" in shown(browser)


def test_values_have_their_own_rows(browser: Browser) -> None:
    browser.open(fragment(text="--model-impl"))
    assert shown(browser) == ["--model-impl"]
    browser.click("#values")
    values = next(argument["values"] for argument in DATA["arguments"] if argument["name"] == "model_impl")
    assert shown(browser) == ["--model-impl", *(f"--model-impl = {value}" for value in values)]


def test_a_click_opens_a_cell_and_its_reason(browser: Browser) -> None:
    browser.open(fragment(platform="npu"))
    browser.click(f'[data-cell="{CELL}"]')
    cell = next(
        cell
        for argument in DATA["arguments"]
        for cell in argument["cells"]
        if argument["name"] == "model_impl" and "npu:a2" in cell["on"]
    )
    assert browser.find("#detail-title").text == "model_impl on npu:a2"
    facts = browser.find("#detail-facts").text
    assert cell["reason"] in facts
    assert cell["reason_code"] in facts
    assert browser.texts("#detail-evidence li")
    browser.click("#detail button")
    assert not browser.find("#detail").is_displayed()
    assert browser.path == fragment(platform="npu")


def test_the_keyboard_reaches_opens_and_leaves_cells(browser: Browser) -> None:
    browser.open(fragment(platform="npu", text="--page-size"))
    browser.press("/")
    assert browser.focused() == "text"
    browser.find('#filters [type="reset"]').send_keys(browser.keys.TAB)
    assert browser.focused() == "npu"
    browser.press(browser.keys.TAB)
    assert browser.focused() == "page_size@npu:a2"
    browser.press(browser.keys.ARROW_RIGHT)
    assert browser.focused() == "page_size@npu:a3"
    browser.press(browser.keys.ENTER)
    assert browser.find("#detail-title").text == "page_size on npu:a3"
    assert browser.run("return document.getElementById('detail').contains(document.activeElement)")
    browser.press(browser.keys.ESCAPE)
    browser.wait("!document.getElementById('detail').open")
    assert browser.focused() == "page_size@npu:a3"
    browser.press(browser.keys.HOME)
    assert browser.focused() == "page_size@npu:a2"
    assert browser.run("return document.querySelectorAll('#matrix [tabindex=\"0\"]').length") == 1


def test_arrow_keys_move_through_the_table_and_scroll_to_the_cell(browser: Browser) -> None:
    browser.open("matrix.html")
    browser.run("document.querySelector('#matrix tbody button').focus()")
    browser.press(browser.keys.END, *[browser.keys.ARROW_DOWN] * 30)
    last = [f"{name}:{variant}" for name, platform in DATA["platforms"].items() for variant in platform["variants"]][-1]
    assert browser.focused() == f"{DATA['arguments'][30]['name']}@{last}"
    assert browser.run(
        "const cell = document.activeElement.getBoundingClientRect();"
        "const box = document.getElementById('scroll').getBoundingClientRect();"
        "return cell.top >= box.top && cell.bottom <= box.bottom && cell.left >= box.left && cell.right <= box.right"
    )


def test_all_columns_are_visible_at_1280_pixels(browser: Browser) -> None:
    browser.emulate(LAPTOP)
    browser.open("matrix.html")
    total = sum(len(platform["variants"]) for platform in DATA["platforms"].values())
    browser.wait(f"document.querySelectorAll('#matrix thead th.variant').length === {total}")
    for box in ("document.getElementById('scroll')", "document.documentElement"):
        assert browser.run(f"return {box}.scrollWidth <= {box}.clientWidth"), box


def test_a_platform_folds_into_one_column_that_opens_its_cells(browser: Browser) -> None:
    browser.open(fragment(text="--page-size"))
    browser.click('[data-fold="cuda"]')
    assert browser.path == fragment(text="--page-size", folded="cuda")
    assert browser.focused() == "cuda"
    names = browser.texts("#matrix thead th.variant")
    assert ("sm90" in names, "all" in names, "a3" in names) == (False, True, True)
    browser.click('[data-cell="page_size@cuda"]')
    assert browser.find("#detail-title").text == "page_size on cuda"
    assert len(browser.texts("#detail-evidence li")) == len(DATA["platforms"]["cuda"]["variants"])
    browser.click("#detail-evidence li a")
    assert browser.find("#detail-title").text == "page_size on cuda:sm80"
    browser.press(browser.keys.ESCAPE)
    browser.wait("!document.getElementById('detail').open")
    browser.run("document.querySelector('[data-fold=\"cuda\"]').focus()")
    browser.press(browser.keys.ENTER)
    assert "sm90" in browser.texts("#matrix thead th.variant")


def test_when_evidence_was_recorded_is_listed(browser: Browser) -> None:
    browser.open("matrix.html")
    browser.click("#runs-box summary")
    lines = browser.texts("#runs li")
    places = {place for entry in entries() for cell in entry["cells"] if cell.get("evidence") for place in cell["on"]}
    assert places <= {line.partition(" · ")[0] for line in lines}
    assert all("commits and" in line and "changed lines ago" in line for line in lines)


def test_url_restores_the_whole_view(browser: Browser) -> None:
    state = {"text": "model", "platform": "npu", "variant": "a2", "status": "limited", "level": "E1", "values": "1"}
    browser.open(fragment(**state, cell=CELL))
    assert browser.find("#detail-title").text == "model_impl on npu:a2"
    browser.press(browser.keys.ESCAPE)
    browser.wait("!document.getElementById('detail').open")
    for name in ("text", "platform", "variant", "status", "level"):
        assert browser.find(f"#{name}").get_attribute("value") == state[name]
    assert browser.find("#values").is_selected()
    assert "--model-impl" in shown(browser)


def test_back_returns_to_the_previous_view(browser: Browser) -> None:
    browser.open("matrix.html")
    browser.choose("#platform", "npu")
    browser.choose("#status", "not_applicable")
    assert browser.path == fragment(platform="npu", status="not_applicable")
    browser.driver.back()
    browser.wait("document.getElementById('status').value === ''")
    assert shown(browser) == rows(platform="npu")
    browser.driver.forward()
    browser.wait("document.getElementById('status').value === 'not_applicable'")
    assert shown(browser) == rows(platform="npu", status="not_applicable")


@every("address", ["#cell=nothing%40npu%3Aa2", "#platform=nowhere", "#cell=%25%40", "#status=x&level=y"])
def test_url_of_an_unknown_cell_opens_nothing(browser: Browser, address: str) -> None:
    browser.open("matrix.html" + address)
    assert not browser.find("#detail").is_displayed()
    assert browser.find("#count").text


def test_links_of_a_cell(browser: Browser) -> None:
    browser.open(fragment(cell=CELL))
    browser.click("#detail-links a:nth-child(2)")
    assert browser.path == "support/npu.html"
    assert browser.find("h1").text.startswith("Arguments on npu")
    browser.driver.back()
    browser.wait("document.getElementById('detail')?.open")
    browser.click("#detail-links a")
    assert browser.path == fragment(cell=CELL)
    browser.press(browser.keys.ESCAPE)
    browser.wait("!document.getElementById('detail').open")
    browser.click('.sidebar-tree a[href="flow.html"]')
    assert browser.find("h1").text.startswith("The life of a request")


def test_evidence_is_shown_and_only_verified_cells_are_green(browser: Browser) -> None:
    browser.open("alone/index.html#level=verified&values=1")
    assert "--schedule-policy = lpm" in shown(browser)
    green = browser.run(
        "return [...document.querySelectorAll('[data-cell].verified')].map((each) => each.dataset.cell)"
    )
    assert "schedule_policy=lpm@imagined:mk1" in green
    assert not [name for name in green if name.endswith("mk2")]
    browser.click('[data-cell="schedule_policy=lpm@imagined:mk1"]')
    line = browser.texts("#detail-evidence li")[0]
    for word in ("E4", "passed", "tests/test_it.py::test_it", "Imagined One", "2026-01-02", "c0ffee"):
        assert word in line


def test_further_kinds_of_records_have_rows(browser: Browser) -> None:
    browser.open("alone/index.html")
    browser.choose("#kind", "endpoint")
    assert shown(browser) == ["POST /v1/chat/completions"]
    browser.choose("#kind", "op")
    assert shown(browser) == ["rotate(bfloat16)"]
    browser.click('[data-cell="op:rotate(bfloat16)@imagined:mk2"]')
    assert browser.find("#detail-title").text == "op:rotate(bfloat16) on imagined:mk2"
    assert "odd" in browser.find("#detail-facts").text


@every("page", ["matrix.html", "alone/index.html"])
def test_pages_work_as_local_files(browser: Browser, site: Path, page: str) -> None:
    browser.open((site / page).as_uri())
    assert browser.texts("#matrix tbody th")


@every("scheme", ["light", "dark"])
@every("size", [PHONE, DESKTOP])
def test_contrast_in_both_color_schemes(browser: Browser, scheme: str, size: tuple[int, int]) -> None:
    browser.emulate(size, scheme=scheme)
    backgrounds = set()
    for path in (
        "matrix.html#status=unsupported",
        "alone/index.html#values=1",
        fragment(cell=CELL),
        "support/npu.html",
        "flow.html",
    ):
        browser.open(path)
        seen, pale = browser.low_contrast("article" if path.startswith(("support", "flow")) else "#support-matrix")
        assert pale == [], path
        assert seen > 20, path
        backgrounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    bright = [sum(int(part) for part in color[4:-1].split(",")) > 3 * 128 for color in backgrounds]
    assert bright == [scheme == "light"] * len(backgrounds)


def test_a_page_of_a_report_names_product_and_run_and_opens_a_folded_cell(browser: Browser) -> None:
    """Its evidence has no commit."""
    browser.open("report/index.html#values=1&cell=schedule_policy%3Dlpm%40imagined")
    assert browser.texts("h1") == ["What works on imagined"]
    named = "imagined:mk1 · Imagined mk1 · 2026-01-02 · Imagined One · imagined 1.0 · torch 2.13.0 · 1 cells"
    assert browser.texts("#runs li") == [named]
    assert browser.texts("#detail-evidence li")[0].endswith("E4 · 2026-01-02")
    browser.open("report/index.html#cell=schedule_policy%3Dlpm%40imagined%3Amk1")
    assert browser.texts("#detail-facts dd")[0] == "Imagined mk1"


def test_reader_can_choose_the_color_scheme(browser: Browser) -> None:
    browser.emulate(scheme="dark")
    browser.open("matrix.html")
    browser.run("document.body.dataset.theme = 'light'")
    _, pale = browser.low_contrast("#support-matrix")
    assert pale == []


def test_no_page_is_wider_than_a_phone(browser: Browser, site: Path) -> None:
    browser.emulate(PHONE)
    paths = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    assert "matrix.html" in paths
    for path in [*paths, fragment(cell=CELL), "matrix.html#values=1&platform=npu"]:
        browser.open(path)
        widths = browser.run("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert widths == [PHONE[0], PHONE[0]], path


def test_cells_on_a_phone_have_labels_and_are_large_enough(browser: Browser) -> None:
    browser.emulate(PHONE)
    browser.open(fragment(text="--page-size"))
    browser.wait("document.querySelectorAll('#matrix tbody th').length === 1")
    assert [text.splitlines()[0] for text in browser.texts("#matrix td button")][:2] == ["cpu:avx2", "cpu:avx512"]
    heights = browser.run(
        "return [...document.querySelectorAll('#matrix tbody button')].map((each) => each.offsetHeight)"
    )
    assert min(heights) >= 44
    browser.click('[data-cell="page_size@npu:a3"]')
    assert browser.run("return document.getElementById('detail').getBoundingClientRect().width") <= PHONE[0]
    assert browser.run("return document.getElementById('detail-title').getBoundingClientRect().top") >= 0
