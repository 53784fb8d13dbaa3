"""The pages of a plugin's vendor: from conformance reports, in a folder outside the repository."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from every import every

from srv.cli.main import main
from srv.platform.registry import find_platforms
from srv.testing.conformance.catalogue import CHECKS
from srv.testing.conformance.model import Level, Outcome, Report
from srv_matrix.features import op_records
from srv_matrix.inventory import Inventory, Op
from srv_matrix.matrix import read_plugin_matrix
from srv_matrix.records import Level as Grade
from srv_matrix.records import Status
from srv_matrix.reports import ALL_STEPS, COVERS, with_reported_ops
from srv_matrix.sample import sample_models
from srv_matrix.variant_context import make_variant_context

DEVICE = {"platform": "toy", "variant": "toy1", "name": "toy accelerator", "simulated": True, "available": True}
OTHER_OPS = "causal_conv1d: reference in float32, reference in bfloat16; gated_delta_rule: reference in float32"
OUTCOMES = (
    Outcome("manifest.found", Level.L0, "passed", "found"),
    Outcome("op.rms_norm", Level.L2, "passed", "reference in float32, reference in bfloat16"),
    Outcome(
        "op.others", Level.L2, "passed", "causal_conv1d: a in float32, a in bfloat16; gated_delta_rule: a in float32"
    ),
    Outcome("op.batch_invariant", Level.L2, "passed", "rms_norm (native) in float32"),
    Outcome("op.rotary", Level.L2, "failed", "reference in float32 is off by 2"),
    Outcome("op.linear_int8", Level.L2, "skipped", "the plugin does not declare the capability int8_weights"),
    Outcome("attention.mixed", Level.L2, "passed", "toy_paged, float32, 4 heads, pages of 1; toy_paged, bfloat16, x"),
    Outcome("attention.int8_kv", Level.L2, "passed", "toy_paged, float32, 4 heads, pages of 1"),
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
    assert "11 of which a check has run, 1 failed" in capsys.readouterr().out
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
    attention = ("attention_backend=toy_paged", "decode_attention_backend=toy_paged", "kv_cache_dtype=int8")
    assert {cells[feature]["level"] for feature in attention} == {"E3"}
    levels = {
        feature: cells[feature]["level"] for feature in ("dtype=float32", "dtype=bfloat16", "disable_radix_cache=false")
    }
    assert levels == {"dtype=float32": "E3", "dtype=bfloat16": "E1", "disable_radix_cache=false": "E3"}
    assert cells["disable_radix_cache=true"]["level"] == "E1"  # its check was skipped
    assert cells["op:rms_norm/bfloat16"]["level"] == "E3"
    others = ("op:causal_conv1d/float32", "op:causal_conv1d/bfloat16", "op:gated_delta_rule/float32")
    assert {cells[feature]["level"] for feature in others} == {"E3"}
    assert cells["op:gated_delta_rule/bfloat16"]["level"] == "E1"
    assert (cells["op:rms_norm/float16"]["status"], cells["op:rms_norm/float16"]["level"]) == ("supported", "E1")
    assert cells["op:rotary/float32"]["level"] == "E1"  # its check failed, which shows nothing
    assert cells["op:linear_int8/float32"]["status"] == "unsupported"
    index = (folder / "pages" / "index.md").read_text(encoding="utf-8")
    assert "`srv c` on toy1, toy accelerator (srv 0.1.0, srv-toy-device 0.1.0; 2026-01-02): 8 passed, 1 failed" in index
    assert "failed: op.rotary: reference in float32 is off by 2" in index
    page = (folder / "pages" / "index.html").read_text(encoding="utf-8")
    assert "srv conformance: engine.prefix_cache" in page
    assert "cpu" not in json.loads((folder / "pages" / "support.json").read_text(encoding="utf-8"))["platforms"]


@pytest.mark.slow
def test_a_report_of_one_variant_denies_nothing_of_another(tmp_path: Path) -> None:
    """What the plugin declares of the other variant stays, and is neither raised nor refused."""
    device = {"platform": "npu", "variant": "a2", "name": "Ascend910B3", "simulated": False, "available": True}
    ran = (Outcome("op.rms_norm", Level.L2, "passed", "reference in bfloat16, reference in float16"),)
    replace(REPORT, outcomes=ran, device=device).write(tmp_path / "report.jsonl")
    records = read_plugin_matrix("npu", [tmp_path / "report.jsonl"]).records
    ops = {key: op_record for key, op_record in records.items() if op_record.kind == "op"}
    assert len(ops) > 60
    for (feature, platform, variant), record in ops.items():
        assert record.status is ops[feature, platform, "a2" if variant == "a3" else "a3"].status, feature
    assert [ops["op:rms_norm/bfloat16", "npu", place].level for place in ("a2", "a3")] == [Grade.E4, Grade.E1]


def test_nothing_is_known_of_ops_that_neither_a_report_nor_the_plugin_names() -> None:
    ops = (Op("rms_norm", "", ("float16", "bfloat16")),)
    inventory = with_reported_ops(Inventory(ops=ops), [REPORT])
    assert inventory.implemented.keys() == {"toy:toy1"}
    manifest = find_platforms()["npu"].loaded
    contexts = [make_variant_context(manifest, variant, sample_models()[0]) for variant in manifest.variants]
    smaller = replace(inventory, implemented={"npu:a2": {"rms_norm": ("bfloat16",)}})
    statuses = {
        (record.variant, record.feature): record.status
        for context in contexts
        for record in op_records(context, smaller)
    }
    assert statuses == {
        ("a2", "op:rms_norm/float16"): Status.UNSUPPORTED,
        ("a2", "op:rms_norm/bfloat16"): Status.SUPPORTED,
        ("a3", "op:rms_norm/float16"): Status.UNKNOWN,
        ("a3", "op:rms_norm/bfloat16"): Status.UNKNOWN,
    }


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
    assert {*COVERS, ALL_STEPS} <= {check.name for check in CHECKS}
