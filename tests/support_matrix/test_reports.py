"""The pages of a plugin's vendor: from conformance reports, in a folder outside the repository."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from every import every

from srv.cli.main import main
from srv.testing.conformance.catalogue import CHECKS
from srv.testing.conformance.model import Level, Outcome, Report
from srv_matrix.reports import COVERS

DEVICE = {"platform": "toy", "variant": "toy1", "name": "toy accelerator", "simulated": True, "available": True}
OUTCOMES = (
    Outcome("manifest.found", Level.L0, "passed", "found"),
    Outcome("op.rms_norm", Level.L2, "passed", "reference in float32, reference in bfloat16"),
    Outcome("op.rotary", Level.L2, "failed", "reference in float32 is off by 2"),
    Outcome("op.linear_int8", Level.L2, "skipped", "the plugin does not declare the capability int8_weights"),
    Outcome("engine.greedy", Level.L3, "passed", "7 prompts, 10 tokens each, in float32, pages of 1"),
    Outcome("engine.prefix_cache", Level.L3, "passed", "67 of 74 prompt tokens were cached"),
    Outcome("engine.no_prefix_cache", Level.L3, "skipped", "it did not end"),
)
REPORT = Report(Level.L3, OUTCOMES, {"srv": "0.1.0", "srv-toy-device": "0.1.0"}, DEVICE, "2026-01-02T03:04:05", "srv c")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    REPORT.write("report.jsonl")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "own.md").write_text("the vendor's own page")
    return tmp_path


@pytest.mark.slow
def test_a_vendor_has_pages_without_this_repository(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "generate", "--plugin", "toy", "--evidence", "report.jsonl", "--out", "pages"]) == 0
    assert "4 of which a check has run, 1 failed" in capsys.readouterr().out
    names = {path.name for path in (folder / "pages").iterdir()}
    assert names == {
        "own.md",
        "index.html",
        "index.md",
        "toy.md",
        "endpoints.md",
        "models.md",
        "ops.md",
        "pairs.md",
        "planned.md",
        "quantized.md",
        "weight-formats.md",
        "support.json",
        "support.csv",
    }
    cells = {line["feature"]: line for line in _rows(folder / "pages" / "support.csv")}
    levels = {
        feature: cells[feature]["level"] for feature in ("dtype=float32", "dtype=bfloat16", "disable_radix_cache=false")
    }
    assert levels == {"dtype=float32": "E3", "dtype=bfloat16": "E1", "disable_radix_cache=false": "E3"}
    assert cells["disable_radix_cache=true"]["level"] == "E1"  # its check was skipped
    assert (cells["op:rms_norm/bfloat16"]["level"], cells["op:rms_norm/float16"]["status"]) == ("E3", "unsupported")
    assert cells["op:rotary/float32"]["level"] == "E1"  # its check failed, which shows nothing
    assert cells["op:linear_int8/float32"]["status"] == "unsupported"
    index = (folder / "pages" / "index.md").read_text(encoding="utf-8")
    assert "`srv c` on toy1, toy accelerator (srv 0.1.0, srv-toy-device 0.1.0; 2026-01-02): 4 passed, 1 failed" in index
    assert "failed: op.rotary: reference in float32 is off by 2" in index
    page = (folder / "pages" / "index.html").read_text(encoding="utf-8")
    assert "srv conformance: engine.prefix_cache" in page
    assert "cpu" not in json.loads((folder / "pages" / "support.json").read_text(encoding="utf-8"))["platforms"]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@every(
    ("words", "message"),
    [
        (("--plugin", "nowhere"), "there is no such platform; installed are"),
        (("--plugin", "cpu", "--evidence", "report.jsonl"), "is a report of platform toy, not of cpu"),
        (("--plugin", "toy", "--evidence", "absent.jsonl"), "is not a conformance report"),
        (("--plugin", "toy", "--evidence", "pages/own.md"), "is not a conformance report"),
        (("--plugin", "toy", "--evidence", "elsewhere.jsonl"), "no device was available in that run"),
        (("--evidence", "report.jsonl"), "Set --plugin NAME"),
    ],
)
def test_what_is_no_report_of_the_plugin_is_refused(
    folder: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(REPORT, device={**DEVICE, "available": False}).write("elsewhere.jsonl")
    assert main(["matrix", "generate", *words]) != 0
    assert message in capsys.readouterr().err


def test_every_check_that_shows_a_cell_exists() -> None:
    assert set(COVERS) <= {check.name for check in CHECKS}
