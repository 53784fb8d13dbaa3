"""`srv matrix check` and `diff`: their faults, and that the committed matrix has none."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from committed_matrix import committed_matrix
from every import every
from matrix_world import VARIANTS, evidence, git, matrix, row, table

from srv.args.config import ARGUMENTS
from srv.cli.main import main
from srv.platform.facts import Support
from srv_matrix import check, cli
from srv_matrix import matrix as matrix_module
from srv_matrix.diff import Outcome, compare_table, counts, stale_reasons
from srv_matrix.evidence import (
    compare,
    faults,
    from_line,
    merged,
    prune,
    read_file,
    to_line,
    write_file,
)
from srv_matrix.matrix import Matrix, read_matrix
from srv_matrix.published import Reason
from srv_matrix.records import Level, Status
from srv_matrix.repository import MatrixError, Repository

ROOT = Path(__file__).resolve().parents[2]
PLACES = [("imagined", variant) for variant in VARIANTS]
PLANNED = next(argument for argument in ARGUMENTS.values() if argument.arg.planned and argument.kind.base is bool)
NINE = (
    "--model-impl",
    "--expert-parallel-size",
    "--moe-a2a-backend",
    "--moe-runner-backend",
    "--deepep-mode",
    "--cuda-graph-max-bs",
    "--cuda-graph-bs",
    "--disable-cuda-graph-padding",
    "--piecewise-cuda-graph-max-tokens",
)


@pytest.fixture(scope="module")
def small() -> Matrix:
    return matrix()


@pytest.fixture(scope="module")
def committed() -> Matrix:
    return committed_matrix()


@pytest.mark.slow
def test_the_committed_matrix_is_consistent(committed: Matrix) -> None:
    assert check.check(committed, Repository(ROOT)) == []


@pytest.mark.slow
def test_the_committed_matrix_is_judged_once(committed: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_module, "judge", None)
    again = read_matrix(Repository(ROOT))
    assert (again.records, again.defaults) == (committed.records, committed.defaults)


@pytest.mark.slow
def test_all_published_rows_are_classified_and_explained(committed: Matrix) -> None:
    (ascend,) = committed.tables
    compared = compare_table(committed, ascend)
    assert sum(one.row is not None for one in compared) == 255
    assert [one.flag for one in compared if not one.explained] == []
    assert sum(counts(compared).values()) == len(compared)


@pytest.mark.slow
def test_rows_that_differ_by_variant_differ_here_too(committed: Matrix) -> None:
    (ascend,) = committed.tables
    differing = [published for published in ascend.rows if len(set(published.supported.values())) > 1]
    assert [one.flag for one in differing] == list(NINE)
    same = []
    for one in differing:
        argument = ascend.argument(one)
        assert argument is not None, one.flag
        cells = [committed.cell(argument.name, "npu", variant) for variant in ("a2", "a3")]
        if len({cell.declared for cell in cells if cell is not None}) == 1:
            same.append((one.flag, cells[0].status if cells[0] is not None else None))
    # The backends of experts on one device are the same on both variants, as are batch sizes of graphs in the vendor's
    # own launch lines, and the last limits graphs that are implemented for neither; ascend_reasons.toml says so.
    assert same == [
        ("--moe-runner-backend", Status.SUPPORTED),
        ("--cuda-graph-bs", Status.SUPPORTED),
        ("--piecewise-cuda-graph-max-tokens", Status.UNSUPPORTED),
    ]


def test_missing_and_unknown_arguments_are_faults(small: Matrix) -> None:
    records = [record for record in small.records.values() if record.key != ("port", "imagined", "mk2")]
    records.append(replace(records[0], feature="warp_factor"))
    assert list(check.record_faults(records, PLACES)) == [
        "the record warp_factor on imagined:mk1 names an unknown argument",
        "the argument port has no record for imagined:mk2",
    ]


def without_port(small: Matrix) -> Matrix:
    gone = ("port", "imagined", "mk2")
    return replace(small, records={cell: record for cell, record in small.records.items() if cell != gone})


def with_unknown(small: Matrix) -> Matrix:
    record = small.cell("port", "imagined", "mk1")
    assert record is not None
    renamed = replace(record, feature="warp_factor")
    return replace(small, records={**small.records, renamed.key: renamed})


@every(
    ("broken", "fault"),
    [
        (lambda small: small, ""),
        (without_port, "the argument port has no record for imagined:mk2"),
        (with_unknown, "the record warp_factor on imagined:mk1 names an unknown argument"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_matrix_with_one_fault_does_not_pass(small: Matrix, tmp_path: Path, broken: Any, fault: str) -> None:
    """In a checkout without pages, which are no part of the check."""
    assert check.check(broken(small), Repository(tmp_path)) == ([fault] if fault else [])


@pytest.mark.slow
def test_faults_have_exit_status_2(
    committed: Matrix, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of this checkout's published tables; the matrix is not made again."""
    shutil.copytree(ROOT / "support_matrix" / "published", tmp_path / "support_matrix" / "published")
    good = replace(committed, evidence=(), architectures=None)
    bad = replace(good, tables=(replace(committed.tables[0], reasons=()),))
    for matrix_read, status, line in (
        (good, 0, "the support matrix is consistent"),
        (bad, 2, "without an explanation"),
    ):
        monkeypatch.setattr(cli, "read_matrix", lambda repository, matrix_read=matrix_read: matrix_read)
        assert main(["matrix", "check", "--root", str(tmp_path)]) == status
        assert line in capsys.readouterr().out


def test_cell_without_a_code_and_a_reason_is_a_fault(small: Matrix) -> None:
    record = small.cell("port", "imagined", "mk1")
    assert record is not None
    bare = {**small.records, record.key: replace(record, declared=Status.UNSUPPORTED)}
    assert list(check.record_faults(bare.values(), PLACES)) == [
        "port on imagined:mk1 is unsupported without a code and a reason"
    ]


def test_declarations_of_unknown_arguments_are_faults() -> None:
    shown = matrix(Support("warp_factor", "supported"), Support("disable_radix_cache", "supported"))
    assert list(check.declaration_faults(shown)) == ["platform imagined declares warp_factor, which is not an argument"]


MARK = {"covers": ["schedule_policy=lpm"], "platform": "imagined", "level": "E4", "note": "", "variant": ""}
MARKS = {"tests/test_it.py::test_it": MARK}


@every(
    ("bad", "fault"),
    [
        (evidence("schedule_policy=lpm", test="tests/test_it.py::test_gone"), "there is no such test"),
        (evidence("schedule_policy=lpm", "port"), "the test does not cover port"),
        (evidence("schedule_policy=lpm", level=Level.E5), "the evidence has level E5, but the test's mark has E4"),
        (evidence("schedule_policy=lpm", variant="mk9"), "imagined:mk9 has no cell schedule_policy=lpm"),
        (
            evidence("schedule_policy=lpm", variant="mk2", machine="mk1"),
            "the evidence is for mk2, but it was recorded on mk1",
        ),
        (evidence("schedule_policy=lpm", note="forced path"), "its note is forced path, but that of the mark is empty"),
        (evidence("schedule_policy=lpm", outcome="skipped", reason="no port"), "it was skipped (no port)"),
        (evidence("schedule_policy=lpm", commit="dead"), "commit dead is not an ancestor of HEAD"),
        (evidence("schedule_policy=lpm", outcome="failed"), "its outcome is failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_evidence_is_refused(small: Matrix, bad: object, fault: str) -> None:
    good = evidence("schedule_policy=lpm")
    assert faults([good], small.records, MARKS, "c0ffee".__eq__) == []
    (fault_text,) = faults([bad], small.records, MARKS, "c0ffee".__eq__)  # type: ignore[list-item]
    assert fault in fault_text


def test_evidence_for_another_platform_than_the_tests_is_refused() -> None:
    """A test for one platform cannot be evidence for another; a test for any device can."""
    cells = [("schedule_policy=lpm", "cuda", "sm90")]
    line = evidence("schedule_policy=lpm", platform="cuda", variant="sm90")
    (fault,) = faults([line], cells, MARKS, "c0ffee".__eq__)
    assert fault.endswith("the evidence is for platform cuda, but the test runs on imagined")
    anywhere = {line.test: {**MARK, "platform": ""}}
    assert faults([line], cells, anywhere, "c0ffee".__eq__) == []


def test_evidence_of_a_forced_path_has_its_variant_and_note(small: Matrix) -> None:
    marks = {"tests/test_it.py::test_it": {**MARK, "variant": "mk1", "note": "forced path"}}
    good = evidence("schedule_policy=lpm", machine="mk2", note="forced path")
    assert faults([good], small.records, marks, "c0ffee".__eq__) == []
    for bad, fault in (
        (replace(good, note=""), "its note is empty, but that of the mark is forced path"),
        (replace(good, variant="mk2"), "the evidence is for mk2, but the test forces mk1"),
    ):
        (fault_text,) = faults([bad], small.records, marks, "c0ffee".__eq__)
        assert fault in fault_text


def test_duplicate_evidence_is_a_fault(small: Matrix) -> None:
    good = evidence("schedule_policy=lpm")
    elsewhere = evidence("schedule_policy=lpm", variant="mk2")
    assert faults([good, elsewhere], small.records, MARKS, "c0ffee".__eq__) == []
    (fault,) = faults([good, good], small.records, MARKS, "c0ffee".__eq__)
    assert fault == "evidence of tests/test_it.py::test_it: there are 2 lines for imagined:mk1"


def test_evidence_must_name_a_value_if_values_are_cells(small: Matrix, tmp_path: Path) -> None:
    shown = matrix(evidence=[evidence("schedule_policy")])
    git(tmp_path, "init", "-q")
    text = "\n".join(check.check(shown, Repository(tmp_path)))
    expected = "imagined:mk1 has no cell schedule_policy that a test can cover; if the values of an argument are cells"
    assert expected in text


def test_commit_that_a_shallow_clone_does_not_have_is_a_note(tmp_path: Path) -> None:
    """Evidence is committed after its code, and a clone of only the last commit does not have the previous one."""
    full, shallow = tmp_path / "full", tmp_path / "shallow"
    full.mkdir()
    git(full, "init", "-q")
    parent = ""
    for name in ("code", "evidence"):
        parent = Repository(full).head() if name == "evidence" else ""
        (full / name).write_text(name)
        git(full, "add", "-A")
        git(full, "commit", "-q", "-m", name)
    git(tmp_path, "clone", "-q", "--depth", "1", full.as_uri(), str(shallow))
    one = evidence("schedule_policy=lpm", commit=parent)
    for root, seen in ((full, True), (shallow, None)):
        repository = Repository(root)
        assert repository.is_ancestor(parent) is seen
        notes = check.notes(matrix(evidence=[one]), repository)
        assert any(parent in note for note in notes) is (seen is None)
    assert Repository(full).is_ancestor("0" * 40) is False


@pytest.mark.parametrize(
    "change", ['"level": "E9"', '"outcome": "maybe"', '"covers": []', '"date": "today"', '"versions": "2"', '"x": 1']
)
def test_a_damaged_line_names_file_and_line(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x.jsonl"
    write_file(path, [evidence("port")])
    assert read_file(path) == (evidence("port"),)
    line = to_line(evidence("port"))
    assert from_line(line) == evidence("port")
    path.write_text(line + "\n" + line.removesuffix("}") + ", " + change + "}\n")
    with pytest.raises(MatrixError, match=r"x\.jsonl line 2: "):
        read_file(path)


def test_pruning_removes_only_invalid_evidence(small: Matrix, tmp_path: Path) -> None:
    """A file without valid lines is removed."""
    good = evidence("schedule_policy=lpm")
    gone = evidence("schedule_policy=lpm", test="tests/test_it.py::test_gone")
    failed = evidence("schedule_policy=lpm", variant="mk2", outcome="failed")
    write_file(tmp_path / "one.jsonl", [good, gone, failed])
    write_file(tmp_path / "two.jsonl", [gone])
    none = "evidence of tests/test_it.py::test_gone: there is no such test, or it is not marked with covers"
    fix = "its outcome is failed: fix the test, or declare the cell as unsupported"
    assert prune(tmp_path, small.records, MARKS, "c0ffee".__eq__) == [
        f"one.jsonl: {none}",
        f"one.jsonl: evidence of tests/test_it.py::test_it: {fix}",
        f"two.jsonl: {none}",
    ]
    assert {path.name: read_file(path) for path in tmp_path.iterdir()} == {"one.jsonl": (good,)}
    assert prune(tmp_path, small.records, MARKS, "c0ffee".__eq__) == []


def test_lines_of_tests_that_were_not_run_are_kept(tmp_path: Path) -> None:
    """A test has one line per machine, which is replaced even if its variant changes."""
    path = tmp_path / "folder" / "x.jsonl"
    old = [evidence("host", test="a"), evidence("host", test="b"), evidence("host", test="b", variant="mk2")]
    lines = merged(merged(old, failed := replace(old[1], outcome="failed")), new := evidence("port=1", test="c"))
    write_file(path, merged(lines, forced := replace(old[0], variant="mk0")))
    assert read_file(path) == (forced, failed, new, old[2])
    assert [file.name for file in path.parent.iterdir()] == ["x.jsonl"]


def test_a_run_may_not_contradict_evidence() -> None:
    """Of tests in the run alone: any that fails or is expected to, and one that is skipped where nothing may be."""
    committed = [evidence("host", test=test) for test in ("a", "b", "c", "d", "e", "gone")]
    skipped = {"outcome": "skipped", "reason": "low ports are not allowed"}
    run = [
        evidence("host", test="a"),
        evidence("host", test="b", outcome="failed", variant="mk2"),
        evidence("host", test="c", outcome="skipped", reason="expected to fail: known", variant="mk2"),
        evidence("host", test="d", **skipped),
        evidence("host", test="e", variant="mk2", **skipped),
        evidence("host", test="new", outcome="failed"),
        evidence("host", test="gone", outcome="failed", platform="toy"),
    ]
    but = "but has evidence that it passed"
    refused = [
        f"b on imagined:mk2 failed, {but}",
        f"c on imagined:mk2 was skipped (expected to fail: known), {but}",
    ]
    here = f"d on imagined:mk1 was skipped (low ports are not allowed), {but}"
    there = here.replace("d on imagined:mk1", "e on imagined:mk2")
    assert compare(committed, run, strict=False) == (refused, [here, there])
    assert compare(committed, run, strict=True) == ([*refused, here], [there])
    assert compare(committed, [], strict=True) == ([], [])


DIFFS = [
    ("AGREE", row("--port", True, True), ()),
    ("AGREE", row("--log-level", True, True, "debug, info, warning, error"), ()),
    ("VENDOR_ONLY", row("--schedule-policy", True, True), ("schedule_policy", ())),
    ("OURS_ONLY", row("--port", False, False), ()),
    ("VALUE_SUBSET", row("--log-level", True, True, "info, error"), ()),
    ("VARIANT_DIFFERS", row("--schedule-policy", True, True), ("schedule_policy", ("mk2",))),
    ("MISSING_ARG", row("--warp-factor", True, True), ()),
    ("NO_EVIDENCE", row(PLANNED.flag, True, True), ()),
    ("AGREE", row(PLANNED.flag, False, False), (PLANNED.name, ())),
    ("VENDOR_ONLY", row(PLANNED.flag, True, True), (PLANNED.name, ())),
    ("VENDOR_ONLY_PLANNED", row(PLANNED.flag, True, True), (PLANNED.name, (), "supported")),
    ("VENDOR_ONLY_PLANNED", row(PLANNED.flag, True, True), (PLANNED.name, (), "limited")),
    ("OURS_PLANNED", row(PLANNED.flag, False, False), (PLANNED.name, (), "supported")),
    (
        "VALUE_SUBSET",
        row("--speculative-algorithm", True, True, "NGRAM, EAGLE"),
        ("speculative_algorithm", (), "supported"),
    ),
]


@pytest.mark.slow
@every(("outcome", "theirs", "ours"), DIFFS)
def test_rows_are_classified(outcome: str, theirs: object, ours: tuple[Any, ...]) -> None:
    """A row agrees only if a launch does what the page says: what core refuses as planned has classes of its own."""
    status = ours[2] if len(ours) > 2 else "unsupported"
    support = [Support(ours[0], status, "a reason", variants=ours[1])] if ours else []
    vendor = table(theirs)  # type: ignore[arg-type]
    compared = compare_table(matrix(*support, features=False), vendor)
    assert compared[0].outcome is Outcome(outcome)
    assert compared[0].explained == (outcome in ("AGREE", "VENDOR_ONLY_PLANNED"))
    if outcome.endswith("PLANNED"):
        assert "ours planned" in compared[0].detail
    assert {one.outcome for one in compared[1:]} == {Outcome.UNKNOWN_ARG}


def test_unexplained_rows_and_unused_reasons_are_faults(small: Matrix) -> None:
    rows = (row("--port", False, False), row("--warp-factor", True, True))
    bare = replace(small, tables=(table(*rows),))
    assert [fault.partition(" without an explanation")[0] for fault in check.table_faults(bare, "vendor")] == [
        "vendor: --port is OURS_ONLY",
        "vendor: --warp-factor is MISSING_ARG",
    ]
    reasons = (
        Reason("OURS_ONLY", ("--port",), "HTTP is ours"),
        Reason("MISSING_ARG", ("*",), "not yet"),
        Reason("AGREE", ("--port",), "once"),
    )
    vendor = table(*rows, reasons=reasons)
    explained = replace(small, tables=(vendor,))
    assert list(check.table_faults(explained, "vendor")) == [
        "vendor: there is a reason for --port as AGREE, but it is OURS_ONLY",
    ]
    assert stale_reasons(vendor, compare_table(explained, vendor)) == list(check.table_faults(explained, "vendor"))
