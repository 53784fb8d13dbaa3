"""`srv matrix check` and `diff`: what makes them fail, and that the committed matrix does not."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from matrix_world import VARIANTS, evidence, git, matrix, row, table

from srv.args.config import ARGUMENTS
from srv.cli.main import main
from srv.platform.facts import Support
from srv_matrix import check
from srv_matrix.diff import Outcome, compare_table, counts, stale_reasons
from srv_matrix.evidence import (
    VOLATILE,
    compare,
    faults,
    from_line,
    merge_file,
    prune,
    read_file,
    skips,
    to_line,
    uncommitted,
    unrecorded,
    write_file,
)
from srv_matrix.marks import mark
from srv_matrix.matrix import Matrix, read_matrix
from srv_matrix.pages import platform_page
from srv_matrix.published import Reason
from srv_matrix.records import Evidence, Level, Status
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
    """The matrix of this checkout."""
    return read_matrix(Repository(ROOT))


def test_the_committed_matrix_is_consistent(committed: Matrix) -> None:
    assert check.check(committed, Repository(ROOT)) == []


def test_all_published_rows_are_classified_and_explained(committed: Matrix) -> None:
    (ascend,) = committed.tables
    compared = compare_table(committed, ascend)
    assert sum(each.row is not None for each in compared) == 255
    assert [each.flag for each in compared if not each.explained] == []
    assert sum(counts(compared).values()) == len(compared)


def test_the_nine_rows_that_differ_there_differ_here(committed: Matrix) -> None:
    (ascend,) = committed.tables
    differing = [each for each in ascend.rows if len(set(each.says.values())) > 1]
    assert [each.flag for each in differing] == list(NINE)
    for each in differing:
        argument = ascend.argument(each)
        assert argument is not None, each.flag
        cells = [committed.cell(argument.name, "npu", variant) for variant in ("a2", "a3")]
        assert len({cell.declared for cell in cells if cell is not None}) == 2, each.flag


def test_the_page_of_the_published_platform_has_its_sections_and_columns(committed: Matrix) -> None:
    (ascend,) = committed.tables
    npu = next(each for each in committed.manifests if each.name == "npu")
    lines = platform_page(committed, npu).splitlines()
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == list(ascend.sections)
    assert len(ascend.sections) == 28
    heads = {line for line in lines if line.startswith("| Argument")}
    assert heads == {"| Argument | Description | Defaults | Options | A2 Supported | A3 Supported |"}
    rows = [line for line in lines if line.startswith("| `--")]
    assert [line.split("`")[1] for line in rows[:255]] == [each.flag for each in ascend.rows]


def test_a_golden_page() -> None:
    """The whole head of a page, with each kind of mark."""
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
    assert page[: page.index("# Arguments that the published page does not have")] == (
        "<!-- Made by `srv matrix generate` (make matrix). Do not edit. -->\n"
        "# Arguments on imagined\n"
        "\n"
        "exists in tests only.\n"
        "\n"
        "- `mk1`: nothing has been run there yet; every mark is a declaration.\n"
        "- `mk2`: 2 cells were run on the device.\n"
        "\n"
        "Sections and order are those of the published page (What the vendor says).\n"
        "\n"
        "## One\n"
        "\n"
        "| Argument | Description | Defaults | Options | MK1 Supported | MK2 Supported |\n"
        "| --- | --- | --- | --- | :---: | :---: |\n"
        f"| `--page-size` | {size.arg.help} | `32` | Type: int, at least 1 | partly, declared (E1) | ✅ partly (E4) |\n"
        "\n"
        "<details><summary>Why</summary>\n"
        "\n"
        "- `--page-size`: not 1, 2: wide: requires page_size 32, not 1 (set by the user). `[no_backend_fits]`\n"
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
        "<details><summary>Why</summary>\n"
        "\n"
        f"- `{PLANNED.flag}` (mk1): {PLANNED.arg.planned}. `[planned]`\n"
        f"- `{PLANNED.flag}` (mk2): the device cannot. `[unsupported]`\n"
        "\n"
        "</details>\n"
        "\n"
    )


def test_a_forced_path_is_green_with_a_note_and_was_not_run_on_the_device() -> None:
    """Until the same cell is run on such a device; then no note is left."""
    forced = evidence("port=30000", machine="mk2", note="forced path")
    shown = matrix(evidence=[forced])
    assert mark(shown.cell("port=30000", "imagined", "mk1")) == "✅ yes (E4, forced path)"
    page = platform_page(shown, shown.manifests[0])
    assert "- `mk1`: 0 cells were run on the device, 1 on a newer one made to take its path.\n" in page
    real = matrix(evidence=[forced, evidence("port=30000", test="tests/test_it.py::test_other")])
    assert mark(real.cell("port=30000", "imagined", "mk1")) == "✅ yes (E4)"
    assert "- `mk1`: 1 cells were run on the device.\n" in platform_page(real, real.manifests[0])


def test_what_ran_on_a_simulated_device_is_told_as_such() -> None:
    """It is not run on the device, and no longer a mere declaration."""
    shown = matrix(evidence=[evidence("port=30000", level=Level.E3)])
    page = platform_page(shown, shown.manifests[0])
    assert "- `mk1`: 0 cells were run on the device, 1 on a simulated one or compiled for it.\n" in page


def test_check_sees_a_missing_and_an_unknown_argument(small: Matrix) -> None:
    records = [each for each in small.records.values() if each.key != ("port", "imagined", "mk2")]
    records.append(replace(records[0], feature="warp_factor"))
    assert list(check.record_faults(records, PLACES)) == [
        "the record warp_factor on imagined:mk1 names an unknown argument",
        "the argument port has no record on imagined:mk2",
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
        (lambda small: small, lambda folder: (folder / "mars.md").write_text(""), "support/mars.md is no page"),
        (without_port, None, "the argument port has no record on imagined:mk2"),
        (with_unknown, None, "the record warp_factor on imagined:mk1 names an unknown argument"),
    ],
)
def test_a_checkout_with_one_thing_broken_does_not_pass(
    small: Matrix, tmp_path: Path, break_records: Any, break_pages: Any, fault: str
) -> None:
    """A whole checkout in a folder of its own. Where records are broken the pages are made of the broken ones."""
    repository = Repository(tmp_path)
    broken = break_records(small)
    check.write_outputs(broken, repository.pages)
    if break_pages is not None:
        break_pages(repository.pages)
    found = check.check(broken, repository)
    assert len(found) == bool(fault)
    assert all(fault in each for each in found)


def test_the_command_ends_with_a_status_that_make_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This checkout's published tables, and pages of which one is missing."""
    for part in ("support_matrix/published", "docs/support"):
        shutil.copytree(ROOT / part, tmp_path / part)
    (tmp_path / "docs" / "support" / "npu.md").unlink()
    assert main(["matrix", "check", "--root", str(tmp_path)]) == 2
    assert "- support/npu.md is missing: run `make matrix`" in capsys.readouterr().out


def test_check_wants_a_code_and_a_reason(small: Matrix) -> None:
    record = small.cell("port", "imagined", "mk1")
    assert record is not None
    bare = {**small.records, record.key: replace(record, declared=Status.UNSUPPORTED)}
    assert list(check.record_faults(bare.values(), PLACES)) == [
        "port on imagined:mk1 is unsupported without a code and a reason"
    ]


def test_check_sees_declarations_that_do_not_hold() -> None:
    said = matrix(Support("warp_factor", "supported"), Support("disable_radix_cache", "supported"))
    assert list(check.declaration_faults(said)) == ["platform imagined declares warp_factor, which is no argument"]


def test_check_sees_stale_missing_and_strange_pages(small: Matrix, tmp_path: Path) -> None:
    folder = tmp_path / "support"
    made = check.outputs(small)
    assert [fault for fault in check.page_faults(made, folder) if "is missing" not in fault] == []
    check.write_outputs(small, folder)
    assert list(check.page_faults(made, folder)) == []
    (folder / "imagined.md").write_text(made["imagined.md"].replace("declared", "verified", 1))
    (folder / "index.md").unlink()
    (folder / "other.md").write_text("x")
    told = "\n".join(check.page_faults(made, folder))
    assert "support/imagined.md is stale: run `make matrix`" in told
    assert "support/index.md is missing" in told
    assert "support/other.md is no page of the matrix" in told
    assert set(check.write_outputs(small, folder)) == {"imagined.md", "index.md", "other.md"}
    assert list(check.page_faults(made, folder)) == []


def test_pages_do_not_change_from_one_making_to_the_next(small: Matrix) -> None:
    assert check.outputs(matrix()) == check.outputs(small)


MARK = {"covers": ["schedule_policy=lpm"], "platform": "imagined", "level": "E4", "note": "", "variant": ""}
MARKS = {"tests/test_it.py::test_it": MARK}


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (evidence("schedule_policy=lpm", test="tests/test_it.py::test_gone"), "there is no such test"),
        (evidence("schedule_policy=lpm", "port"), "the test does not cover port"),
        (evidence("schedule_policy=lpm", level=Level.E5), "the evidence says E5, the test's mark E4"),
        (evidence("schedule_policy=lpm", variant="mk9"), "there is no cell schedule_policy=lpm of imagined:mk9"),
        (
            evidence("schedule_policy=lpm", variant="mk2", machine="mk1"),
            "the evidence is of mk2, and it was recorded on mk1",
        ),
        (evidence("schedule_policy=lpm", note="forced path"), "its note is forced path, the mark's empty"),
        (evidence("schedule_policy=lpm", outcome="skipped", reason="no port"), "it was skipped (no port)"),
        (evidence("schedule_policy=lpm", commit="dead"), "commit dead is no ancestor of HEAD"),
        (evidence("schedule_policy=lpm", outcome="failed"), "its outcome is failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_evidence_is_refused(small: Matrix, bad: object, fault: str) -> None:
    good = evidence("schedule_policy=lpm")
    assert faults([good], small.records, MARKS, "c0ffee".__eq__) == []
    (told,) = faults([bad], small.records, MARKS, "c0ffee".__eq__)  # type: ignore[list-item]
    assert fault in told


def test_evidence_of_another_platform_than_ran_is_refused() -> None:
    """A line of another device that a test of this one is said to have written; and one that a test of any may."""
    cells = [("schedule_policy=lpm", "cuda", "sm90")]
    line = evidence("schedule_policy=lpm", platform="cuda", variant="sm90")
    (told,) = faults([line], cells, MARKS, "c0ffee".__eq__)
    assert told.endswith("the evidence is of platform cuda, and what the test runs is imagined")
    anywhere = {line.test: {**MARK, "platform": ""}}
    assert faults([line], cells, anywhere, "c0ffee".__eq__) == []


def test_evidence_of_a_forced_path_is_of_that_variant_and_says_so(small: Matrix) -> None:
    marks = {"tests/test_it.py::test_it": {**MARK, "variant": "mk1", "note": "forced path"}}
    good = evidence("schedule_policy=lpm", machine="mk2", note="forced path")
    assert faults([good], small.records, marks, "c0ffee".__eq__) == []
    for bad, fault in (
        (replace(good, note=""), "its note is empty, the mark's forced path"),
        (replace(good, variant="mk2"), "the evidence is of mk2, and the test forces mk1"),
    ):
        (told,) = faults([bad], small.records, marks, "c0ffee".__eq__)
        assert fault in told


def test_evidence_of_one_test_is_there_once_a_machine(small: Matrix) -> None:
    good = evidence("schedule_policy=lpm")
    elsewhere = evidence("schedule_policy=lpm", variant="mk2")
    assert faults([good, elsewhere], small.records, MARKS, "c0ffee".__eq__) == []
    (told,) = faults([good, good], small.records, MARKS, "c0ffee".__eq__)
    assert told == "evidence of tests/test_it.py::test_it: it is there twice for imagined:mk1"


def test_evidence_names_a_value_where_values_are_cells(small: Matrix, tmp_path: Path) -> None:
    shown = matrix(evidence=[evidence("schedule_policy")])
    git(tmp_path, "init", "-q")
    told = "\n".join(check.check(shown, Repository(tmp_path)))
    assert "there is no cell schedule_policy of imagined:mk1 that a test could show; of an argument whose" in told


def test_a_commit_that_a_shallow_clone_cannot_see_is_no_fault_and_is_told(tmp_path: Path) -> None:
    """Evidence is committed one commit after its code, and a clone of the last commit alone lacks the one before."""
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
        told = check.notes(matrix(evidence=[one]), repository)
        assert [parent in note for note in told] == ([] if seen else [True])
    assert Repository(full).is_ancestor("0" * 40) is False


@pytest.mark.parametrize("change", ['"level": "E9"', '"outcome": "maybe"', '"covers": []', '"date": "today"', '"x": 1'])
def test_a_damaged_line_names_file_and_line(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x.jsonl"
    write_file(path, [evidence("port")])
    assert read_file(path) == (evidence("port"),)
    line = to_line(evidence("port"))
    assert from_line(line) == evidence("port")
    path.write_text(line + "\n" + line.removesuffix("}") + ", " + change + "}\n")
    with pytest.raises(MatrixError, match=r"x\.jsonl line 2: "):
        read_file(path)


def test_pruning_leaves_what_stands(small: Matrix, tmp_path: Path) -> None:
    """Of two files, one loses a line whose test is gone, and the other, with nothing left, goes itself."""
    good = evidence("schedule_policy=lpm")
    gone = evidence("schedule_policy=lpm", test="tests/test_it.py::test_gone")
    failed = evidence("schedule_policy=lpm", variant="mk2", outcome="failed")
    write_file(tmp_path / "one.jsonl", [good, gone, failed])
    write_file(tmp_path / "two.jsonl", [gone])
    none = "evidence of tests/test_it.py::test_gone: there is no such test, or it is marked to cover nothing"
    mend = "its outcome is failed: declare the cell for what it is, or mend it"
    assert prune(tmp_path, small.records, MARKS, "c0ffee".__eq__) == [
        f"one.jsonl: {none}",
        f"one.jsonl: evidence of tests/test_it.py::test_it: {mend}",
        f"two.jsonl: {none}",
    ]
    assert {path.name: read_file(path) for path in tmp_path.iterdir()} == {"one.jsonl": (good,)}
    assert prune(tmp_path, small.records, MARKS, "c0ffee".__eq__) == []


def test_lines_of_tests_that_did_not_run_stay(tmp_path: Path) -> None:
    """Of one test on one machine there is one line, whatever it was forced to be before."""
    path = tmp_path / "folder" / "x.jsonl"
    old = [evidence("host", test="a"), evidence("host", test="b"), evidence("host", test="b", variant="mk2")]
    write_file(path, old)
    merge_file(path, [failed := replace(old[1], outcome="failed"), new := evidence("port=1", test="c")])
    assert read_file(path) == (old[0], failed, new, old[2])
    merge_file(path, [forced := replace(old[0], variant="mk0")])
    assert read_file(path) == (forced, failed, new, old[2])
    assert [each.name for each in path.parent.iterdir()] == ["x.jsonl"]


def test_marked_tests_without_evidence_are_told_for_each_platform_that_has_some() -> None:
    marks = {
        "a": MARK,
        "b": MARK,
        "anywhere": {**MARK, "platform": ""},
        "elsewhere": {**MARK, "platform": "cuda"},
    }
    assert unrecorded([], marks) == {}
    assert unrecorded([evidence("host", test="a")], marks) == {"imagined": ["b", "anywhere"]}
    assert unrecorded([evidence("host", test=test) for test in ("a", "b", "anywhere")], marks) == {}


def test_a_note_of_the_check_names_them(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    told = check.notes(matrix(evidence=[evidence("host", test="a")]), Repository(tmp_path), {"a": MARK, "b": MARK})
    assert told == ["1 marked tests have no line of imagined (record them there): b"]


def test_a_second_run_is_compared_with_what_is_committed() -> None:
    once = [
        evidence("port=1", "port=2", test="a"),
        evidence("host", test="b"),
        evidence("host", test="c", level=Level.E3),
        evidence("port=1", test="e", variant="mk2"),
        evidence("port=1", test="a", variant="mk2", note="not this one"),
    ]
    again = [
        evidence("port=1", test="a", outcome="failed"),
        evidence("host", test="c", level=Level.E2, note="forced path"),
        evidence("api_key", test="d"),
    ]
    assert compare(once[:3], once[:3]) == []
    assert compare(once, again) == [
        "a on imagined:mk1: outcome was passed, and is failed",
        "a on imagined:mk1: it covers port=2 no more",
        "b on imagined:mk1 is committed, and did not run again",
        "c on imagined:mk1: note was empty, and is forced path",
        "c on imagined:mk1: level was E3, and is E2",
        "e on imagined:mk1 is committed, and did not run again",
    ]
    assert uncommitted(once, again) == ["api_key on imagined:mk1"]


def test_a_second_run_without_evidence_bears_out_nothing() -> None:
    none = ["the fresh run holds no evidence: no marked test ran"]
    assert compare([evidence("host")], []) == none
    assert compare([evidence("host")], [evidence("host", outcome="skipped", reason="no port")]) == none


FORCED = evidence("host", test="forced", machine="mk2", note="forced path")
HERE = (evidence("host", test="a", variant="mk2"), evidence("port=1", test="b", variant="mk2"), FORCED)


def test_a_forced_path_is_no_machine_of_that_variant() -> None:
    """Lines of mk1 that an mk2 made are of that mk2's run: they stand for no mk1, and hide nothing of mk2."""
    gone = [f"{test} on imagined:mk2 is committed, and did not run again" for test in "ab"]
    assert compare(HERE, HERE) == []
    assert compare(HERE, [FORCED]) == gone
    real = [replace(each, variant="mk1", machine="mk1") for each in HERE]
    assert compare(HERE, real) == []
    assert compare(HERE, [replace(real[0], outcome="failed"), *real[1:]]) == [
        "a on imagined:mk1: outcome was passed, and is failed"
    ]
    assert compare(HERE, real[2:]) == [told.replace("mk2", "mk1") for told in gone]


def test_a_test_that_cannot_run_here_is_a_note_with_its_reason() -> None:
    skipped = replace(HERE[1], outcome="skipped", reason="low ports are barred")
    again = [HERE[0], skipped, FORCED]
    assert compare(HERE, again) == []
    assert skips(HERE, again) == ["b on imagined:mk2 was skipped: low ports are barred"]
    assert skips(HERE, HERE) == []
    assert uncommitted([], [skipped]) == []


def test_on_a_variant_without_evidence_the_tests_of_the_others_must_pass() -> None:
    """Whoever runs the tests has one processor, and it need not be the one that the evidence is of."""
    once = [evidence("host", test="a"), evidence("port=1", test="b")]
    here = [evidence("host", test="a", variant="mk2"), evidence("port=1", test="b", variant="mk2", outcome="failed")]
    assert compare(once, here) == ["b on imagined:mk2: outcome was passed, and is failed"]
    assert compare(once, here[:1]) == ["b on imagined:mk2 is committed, and did not run again"]


@pytest.mark.parametrize("field", [field.name for field in fields(Evidence)])
def test_each_field_is_compared_or_may_differ(field: str) -> None:
    """Two machines, two days, two commits: only what a test showed is compared."""
    other = {
        "covers": ("host",), "platform": "toy", "variant": "mk3", "level": Level.E2, "test": "b",
        "outcome": "failed", "note": "forced path", "machine": "mk3", "reason": "why",
    }  # fmt: skip
    once = [evidence("port=1", test="a")]
    again = [replace(once[0], **{field: other.get(field, "another")})]  # type: ignore[arg-type]
    # Another machine is compared all the same, another platform not at all; the rest is for `faults` to judge.
    elsewhere = field in ("platform", "variant", "machine", "reason")
    assert (compare(once, again) == []) == (field in VOLATILE or elsewhere)
    assert (field in VOLATILE) == (field not in other)


DIFFS = [
    ("AGREE", row("--port", True, True), ()),
    ("AGREE", row("--log-level", True, True, "debug, info, warning, error"), ()),
    ("VENDOR_ONLY", row("--schedule-policy", True, True), ("schedule_policy", ())),
    ("OURS_ONLY", row("--port", False, False), ()),
    ("VALUE_SUBSET", row("--log-level", True, True, "info, error"), ()),
    ("VARIANT_DIFFERS", row("--schedule-policy", True, True), ("schedule_policy", ("mk2",))),
    ("MISSING_ARG", row("--warp-factor", True, True), ()),
    ("NO_EVIDENCE", row(PLANNED.flag, True, True), ()),
]


@pytest.mark.parametrize(("outcome", "theirs", "ours"), DIFFS)
def test_rows_are_classified(outcome: str, theirs: object, ours: tuple[str, tuple[str, ...]]) -> None:
    said = [Support(ours[0], "unsupported", "no", variants=ours[1])] if ours else []
    vendor = table(theirs)  # type: ignore[arg-type]
    compared = compare_table(matrix(*said), vendor)
    assert compared[0].outcome is Outcome(outcome)
    assert compared[0].explained == (outcome == "AGREE")
    assert {each.outcome for each in compared[1:]} == {Outcome.UNKNOWN_ARG}


def test_unexplained_rows_and_reasons_for_nothing_are_faults(small: Matrix) -> None:
    rows = (row("--port", False, False), row("--warp-factor", True, True))
    bare = replace(small, tables=(table(*rows),))
    assert [fault.partition(" and nobody")[0] for fault in check.table_faults(bare, "vendor")] == [
        "vendor: --port is OURS_ONLY",
        "vendor: --warp-factor is MISSING_ARG",
    ]
    reasons = (
        Reason("OURS_ONLY", ("--port",), "HTTP is ours"),
        Reason("MISSING_ARG", ("*",), "not yet"),
        Reason("AGREE", ("--port",), "once"),
    )
    vendor = table(*rows, reasons=reasons)
    told = replace(small, tables=(vendor,))
    assert list(check.table_faults(told, "vendor")) == [
        "vendor: a reason for --port as AGREE, but it is OURS_ONLY",
    ]
    assert stale_reasons(vendor, compare_table(told, vendor)) == list(check.table_faults(told, "vendor"))
