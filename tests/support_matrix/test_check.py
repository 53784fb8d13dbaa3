"""`srv matrix check` and `diff`: their faults, and that the committed matrix has none."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from every import every
from matrix_world import VARIANTS, evidence, git, manifest, matrix, row, table

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
from srv_matrix.marks import mark
from srv_matrix.matrix import Matrix, make_matrix, read_matrix
from srv_matrix.pages import platform_page
from srv_matrix.published import Reason
from srv_matrix.records import Level, Status
from srv_matrix.repository import MatrixError, Repository
from srv_matrix.weight_formats import weight_formats

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
    """The matrix of this checkout."""
    return read_matrix(Repository(ROOT))


def test_the_committed_matrix_is_consistent(committed: Matrix) -> None:
    assert check.check(committed, Repository(ROOT)) == []


def test_the_committed_matrix_is_judged_once(committed: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_module, "judge", None)
    again = read_matrix(Repository(ROOT))
    assert (again.records, again.defaults) == (committed.records, committed.defaults)


def test_all_published_rows_are_classified_and_explained(committed: Matrix) -> None:
    (ascend,) = committed.tables
    compared = compare_table(committed, ascend)
    assert sum(each.row is not None for each in compared) == 255
    assert [each.flag for each in compared if not each.explained] == []
    assert sum(counts(compared).values()) == len(compared)


def test_rows_that_differ_by_variant_differ_here_too(committed: Matrix) -> None:
    (ascend,) = committed.tables
    differing = [each for each in ascend.rows if len(set(each.supported.values())) > 1]
    assert [each.flag for each in differing] == list(NINE)
    same = []
    for each in differing:
        argument = ascend.argument(each)
        assert argument is not None, each.flag
        cells = [committed.cell(argument.name, "npu", variant) for variant in ("a2", "a3")]
        if len({cell.declared for cell in cells if cell is not None}) == 1:
            same.append((each.flag, cells[0].status if cells[0] is not None else None))
    # The backends of experts on one device are the same on both variants, and the other limits graphs that are
    # implemented for neither; ascend_reasons.toml says so.
    assert same == [
        ("--moe-runner-backend", Status.SUPPORTED),
        ("--piecewise-cuda-graph-max-tokens", Status.UNSUPPORTED),
    ]


def test_page_of_a_published_platform_has_its_sections_and_columns(committed: Matrix) -> None:
    (ascend,) = committed.tables
    npu = next(each for each in committed.manifests if each.name == "npu")
    lines = platform_page(committed, npu).splitlines()
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == list(ascend.sections)
    assert len(ascend.sections) == 28
    heads = {line for line in lines if line.startswith("| Argument")}
    assert heads == {"| Argument | Description | Defaults | Options | A2 Supported | A3 Supported |"}
    rows = [line for line in lines if line.startswith("| `--")]
    assert [line.split("`")[1] for line in rows[:255]] == [each.flag for each in ascend.rows]


def test_weight_formats_name_the_kernels_of_each_platform(committed: Matrix) -> None:
    """A method without kernels is refused, or its weights are dequantized."""
    head, _, *lines = ([text.strip() for text in line.split("|")[1:-1]] for line in weight_formats(committed))
    rows = {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in lines}
    for method in ("--quantization awq", "--quantization fp8", "--quantization gguf", "--torchao-config int8wo"):
        cells = rows[f"`{method}`"]
        assert (cells["cpu"].endswith(", by native"), cells["cuda"].endswith(", by triton")) == (True, True), cells
        assert cells["npu"] == ("declared (E1), dequantized" if method.endswith("gguf") else "no (E1)")
        experts = rows.get(f"`{method}`, experts", {})
        assert (not experts) == method.endswith("int8wo")  # int8 weights of experts go with int8 activations
        assert not experts or (experts["cpu"], experts["cuda"]) == ("by native", "by triton"), experts
    assert "by torch_npu (npu_dynamic_quant, npu_quant_matmul)" in rows["`--quantization modelslim`"]["npu"]
    assert rows["`--quantization modelslim`, experts"]["npu"] == "by ascend"


def test_snapshot_of_a_page() -> None:
    """The beginning of a page, with all kinds of marks."""
    published = table(
        row("--page-size", True, True, "Type: int"),
        row(PLANNED.flag, True, False, section="Two"),
        row("--warp-factor", False, False, section="Two"),
    )
    shown = matrix(
        Support("page_size", "supported"),
        Support(PLANNED.name, "supported", variants=("mk1",)),
        Support(PLANNED.name, "unsupported", "the device cannot", variants=("mk2",)),
        tables=[published],
        evidence=[evidence("page_size=32", variant="mk2")],
    )
    page = platform_page(shown, shown.manifests[0])
    size = ARGUMENTS["page_size"]
    assert page[: page.index("# Arguments that are not on the published page")] == (
        "<!-- Generated by `srv matrix generate`. Do not edit. -->\n"
        "# Arguments on imagined\n"
        "\n"
        "exists in tests only.\n"
        "\n"
        "- `mk1`: nothing has been run on this variant yet; all marks are declarations.\n"
        "- `mk2`: 2 cells were run on the device.\n"
        "\n"
        "The sections and their order are those of the published page (What the vendor says).\n"
        "\n"
        "## One\n"
        "\n"
        "| Argument | Description | Defaults | Options | MK1 Supported | MK2 Supported |\n"
        "| --- | --- | --- | --- | :---: | :---: |\n"
        f"| `--page-size` | {size.arg.help} | `32` | Type: int, at least 1 | partly, declared (E1) | ✅ partly (E4) |\n"
        "\n"
        "<details><summary>Reasons</summary>\n"
        "\n"
        "- `--page-size`: not 1, 2: no attention backend of platform imagined can use it: wide requires page_size 32. "
        "`[no_backend_fits]`\n"
        "\n"
        "</details>\n"
        "\n"
        "## Two\n"
        "\n"
        "| Argument | Description | Defaults | Options | MK1 Supported | MK2 Supported |\n"
        "| --- | --- | --- | --- | :---: | :---: |\n"
        f"| {'<br>'.join(f'`{flag}`' for flag in PLANNED.flags)} | {PLANNED.arg.help} | "
        f"`{PLANNED.show(PLANNED.default)}` | true, false | planned (platform: yes, E1) | no (E1) |\n"
        "| `--warp-factor` | | | | not in srv | not in srv |\n"
        "\n"
        "<details><summary>Reasons</summary>\n"
        "\n"
        f"- `{PLANNED.flag}` (mk1): {PLANNED.arg.planned}. `[planned]`\n"
        f"- `{PLANNED.flag}` (mk2): the device cannot. `[unsupported]`\n"
        "\n"
        "</details>\n"
        "\n"
    )


def test_a_forced_path_is_green_with_a_note_and_was_not_run_on_the_device() -> None:
    """The note is omitted once the same cell was run on a device of that variant."""
    forced = evidence("port=30000", machine="mk2", note="forced path")
    shown = matrix(evidence=[forced])
    assert mark(shown.cell("port=30000", "imagined", "mk1")) == "✅ yes (E4, forced path)"
    page = platform_page(shown, shown.manifests[0])
    assert "- `mk1`: 0 cells were run on the device, 1 on a newer device with its code path forced.\n" in page
    real = matrix(evidence=[forced, evidence("port=30000", test="tests/test_it.py::test_other")])
    assert mark(real.cell("port=30000", "imagined", "mk1")) == "✅ yes (E4)"
    assert "- `mk1`: 1 cells were run on the device.\n" in platform_page(real, real.manifests[0])


def test_what_ran_on_a_simulated_device_is_shown_as_such() -> None:
    """It counts neither as run on the device nor as a declaration."""
    shown = matrix(evidence=[evidence("port=30000", level=Level.E3)])
    page = platform_page(shown, shown.manifests[0])
    assert "- `mk1`: 0 cells were run on the device, 1 on a simulated device or only compiled.\n" in page


def test_missing_and_unknown_arguments_are_faults(small: Matrix) -> None:
    records = [each for each in small.records.values() if each.key != ("port", "imagined", "mk2")]
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
    known = replace(record, feature="warp_factor")
    return replace(small, records={**small.records, known.key: known})


def edited(folder: Path) -> None:
    page = folder / "imagined.md"
    page.write_text(page.read_text().replace("declared (E1)", "✅ yes (E4)", 1))


@pytest.mark.parametrize(
    ("break_records", "break_pages", "fault"),
    [
        (lambda small: small, lambda folder: None, ""),
        (lambda small: small, edited, "support/imagined.md is stale"),
        (lambda small: small, lambda folder: (folder / "support.csv").unlink(), "support/support.csv is missing"),
        (lambda small: small, lambda folder: (folder / "mars.md").write_text(""), "support/mars.md is not a page"),
        (without_port, None, "the argument port has no record for imagined:mk2"),
        (with_unknown, None, "the record warp_factor on imagined:mk1 names an unknown argument"),
    ],
)
def test_checkout_with_one_fault_does_not_pass(
    small: Matrix, tmp_path: Path, break_records: Any, break_pages: Any, fault: str
) -> None:
    """A whole checkout in a temporary folder. If records are broken, the pages are generated from them."""
    repository = Repository(tmp_path)
    broken = break_records(small)
    check.write_outputs(broken, repository.pages)
    if break_pages is not None:
        break_pages(repository.pages)
    found = check.check(broken, repository)
    assert len(found) == bool(fault)
    assert all(fault in each for each in found)


def test_faults_have_exit_status_2(
    committed: Matrix, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of this checkout's published tables and pages, with one page missing; the matrix is not made again."""
    monkeypatch.setattr(cli, "read_matrix", lambda repository: replace(committed, evidence=()))
    for part in ("support_matrix/published", "docs/support"):
        shutil.copytree(ROOT / part, tmp_path / part)
    (tmp_path / "docs" / "support" / "npu.md").unlink()
    assert main(["matrix", "check", "--root", str(tmp_path)]) == 2
    assert "- support/npu.md is missing: run `make matrix`" in capsys.readouterr().out


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


def test_stale_missing_and_extraneous_pages_are_faults(small: Matrix, tmp_path: Path) -> None:
    folder = tmp_path / "support"
    generated = check.outputs(small)
    assert [fault for fault in check.page_faults(generated, folder) if "is missing" not in fault] == []
    check.write_outputs(small, folder)
    assert list(check.page_faults(generated, folder)) == []
    (folder / "imagined.md").write_text(generated["imagined.md"].replace("declared", "verified", 1))
    (folder / "index.md").unlink()
    (folder / "other.md").write_text("x")
    found = "\n".join(check.page_faults(generated, folder))
    assert "support/imagined.md is stale: run `make matrix`" in found
    assert "support/index.md is missing" in found
    assert "support/other.md is not a page of the matrix" in found
    assert set(check.write_outputs(small, folder)) == {"imagined.md", "index.md", "other.md"}
    assert list(check.page_faults(generated, folder)) == []


def test_pages_are_deterministic(small: Matrix) -> None:
    assert check.outputs(make_matrix([manifest()], methods=False)) == check.outputs(small)


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
    (found,) = faults([bad], small.records, MARKS, "c0ffee".__eq__)  # type: ignore[list-item]
    assert fault in found


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
        (found,) = faults([bad], small.records, marks, "c0ffee".__eq__)
        assert fault in found


def test_duplicate_evidence_is_a_fault(small: Matrix) -> None:
    good = evidence("schedule_policy=lpm")
    elsewhere = evidence("schedule_policy=lpm", variant="mk2")
    assert faults([good, elsewhere], small.records, MARKS, "c0ffee".__eq__) == []
    (fault,) = faults([good, good], small.records, MARKS, "c0ffee".__eq__)
    assert fault == "evidence of tests/test_it.py::test_it: there are 2 lines for imagined:mk1"


def test_evidence_must_name_a_value_if_values_are_cells(small: Matrix, tmp_path: Path) -> None:
    shown = matrix(evidence=[evidence("schedule_policy")])
    git(tmp_path, "init", "-q")
    found = "\n".join(check.check(shown, Repository(tmp_path)))
    expected = "imagined:mk1 has no cell schedule_policy that a test can cover; if the values of an argument are cells"
    assert expected in found


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
    assert [each.name for each in path.parent.iterdir()] == ["x.jsonl"]


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
    assert {each.outcome for each in compared[1:]} == {Outcome.UNKNOWN_ARG}


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
