"""The pytest plugin that records evidence: in a temporary checkout, on the CPU of this machine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from every import every
from matrix_world import git

from srv_matrix.evidence import collect_marks, faults, read_file, write_file
from srv_matrix.pytest_plugin import covers
from srv_matrix.records import Evidence, Level
from srv_matrix.repository import MatrixError, Repository, find_repository

pytestmark = pytest.mark.slow  # each test runs pytest several times

TESTS = """
import pytest
from srv_matrix.pytest_plugin import covers

@covers("schedule_policy=lpm", platform="cpu")
def test_one():
    assert True

@pytest.mark.parametrize("policy", [
    pytest.param("fcfs", marks=covers("schedule_policy=fcfs", platform="cpu", level="E2", note="slow clock")), "lof",
])
def test_two(policy):
    assert policy

@covers("port", platform="cpu")
def test_three():
    assert False

@covers("host", platform="cpu")
def test_four():
    pytest.skip("not here")

def test_five():
    assert True

@covers("op:rms_norm/float32", platform="cpu", variant="neon", note="forced path")
def test_six():
    assert True

@covers("device")
def test_seven(srv_device):
    assert srv_device in ("cpu", "toy")

@covers("device", platform="toy", level="E2")
def test_eight():
    assert True
"""
LONG_AGO = "2020-01-01"
OF_CPU = {"test_one", "test_two[fcfs]", "test_three", "test_six", "test_seven"}

# A folder with its own hooks, which pytest does not call for other tests.
HOOKS = """
def pytest_runtest_makereport(item, call):
    return None
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A git repository with one test file and an empty index of published tables."""
    root = tmp_path_factory.mktemp("checkout")
    for name, text in (
        ("support_matrix/published/index.toml", ""),
        ("tests/test_cells.py", TESTS),
        ("tests/other/conftest.py", HOOKS),
        ("tests/other/test_other.py", "def test_other(): assert True"),
        (".gitignore", "__pycache__\n"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    return Repository(root)


def run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "srv_matrix.pytest_plugin",
        "-p",
        "no:cacheprovider",
        *options,
    ]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def recorded(checkout: Repository, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evidence]:
    """The evidence of a complete run for comparison."""
    path = tmp_path_factory.mktemp("recorded") / "x.jsonl"
    process = record(checkout, path)
    assert "evidence of 6 tests is in" in process.stdout, process.stdout + process.stderr
    assert ", 1 skipped; 1 marked tests run on another platform" in process.stdout
    return ran(path)


def record(checkout: Repository, path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(
        checkout.root, f"--srv-evidence={path}", "--srv-evidence-device=cpu", "--srv-evidence-any-tree", *options
    )


def ran(path: Path) -> dict[str, Evidence]:
    """The evidence of a file by the name of its test."""
    return {line.test.partition("::")[2]: line for line in read_file(path)}


def test_marked_tests_that_were_run_are_recorded(checkout: Repository, recorded: dict[str, Evidence]) -> None:
    """Only tests that run on this platform are recorded."""
    lines = recorded
    assert lines.keys() == {*OF_CPU, "test_four"}
    one, two = lines["test_one"], lines["test_two[fcfs]"]
    assert (one.covers, one.level, one.outcome) == (("schedule_policy=lpm",), Level.E4, "passed")
    assert (two.covers, two.level, two.note) == (("schedule_policy=fcfs",), Level.E2, "slow clock")
    assert lines["test_three"].outcome == "failed"
    assert (one.platform, one.commit) == ("cpu", checkout.head())
    assert one.variant
    assert one.device
    six = lines["test_six"]
    assert (six.variant, six.machine, six.note) == ("neon", one.variant, "forced path")
    assert one.machine == one.variant


def test_workers_run_tests_and_one_process_records(
    checkout: Repository, recorded: dict[str, Evidence], tmp_path: Path
) -> None:
    process = record(checkout, tmp_path / "x.jsonl", "-n", "2")
    assert ", 1 skipped; 1 marked tests run on another platform" in process.stdout, process.stdout + process.stderr
    lines = {name: replace(line, date=recorded[name].date) for name, line in ran(tmp_path / "x.jsonl").items()}
    assert lines == recorded


def test_a_test_that_ends_its_worker_has_failed(
    checkout: Repository, recorded: dict[str, Evidence], tmp_path: Path
) -> None:
    file = checkout.root / "tests" / "test_cells.py"
    path = tmp_path / "x.jsonl"
    write_file(path, recorded.values())
    file.write_text(TESTS.replace("def test_one():\n    assert True", "def test_one():\n    import os; os._exit(3)"))
    try:
        process = record(checkout, path, "-n", "1", "-k", "one")
    finally:
        file.write_text(TESTS)
    assert "crashed" in process.stdout
    assert {name for name, line in ran(path).items() if line.outcome == "failed"} == {"test_one", "test_three"}


def test_recorded_evidence_matches_the_marks(checkout: Repository) -> None:
    marks = collect_marks(checkout, ["tests/test_cells.py", "tests/test_gone.py"])
    assert marks["tests/test_cells.py::test_two[fcfs]"]["covers"] == ["schedule_policy=fcfs"]
    assert "tests/test_cells.py::test_two[lof]" not in marks
    path = checkout.evidence / "one.jsonl"
    run(checkout.root, f"--srv-evidence={path}", "--srv-evidence-device=cpu", "-k", "one")
    (one,) = read_file(path)
    path.unlink()
    cells = [(cell, one.platform, one.variant) for cell in one.covers]
    assert faults([one], cells, marks, checkout.is_ancestor) == []
    assert not checkout.is_ancestor("0" * 40)


def test_evidence_of_a_simulated_device_is_e3_at_most(checkout: Repository, tmp_path: Path) -> None:
    path = tmp_path / "toy.jsonl"
    process = run(checkout.root, f"--srv-evidence={path}", "--srv-evidence-device=toy")
    assert path.exists(), process.stderr
    places = {name: (line.platform, line.level) for name, line in ran(path).items()}
    assert places == {"test_seven": ("toy", Level.E3), "test_eight": ("toy", Level.E2)}
    assert {line.simulator for line in ran(path).values()} == {f"srv-toy-device {version('srv-toy-device')}"}
    assert "; 5 marked tests run on another platform" in process.stdout


def test_nothing_is_recorded_by_default(checkout: Repository) -> None:
    process = run(checkout.root)
    assert "1 failed, 8 passed, 1 skipped" in process.stdout
    assert "evidence" not in process.stdout


@pytest.mark.parametrize(
    ("device", "dirty", "reason"),
    [
        ("cpu", True, "commit first, these files have changed: tests/test_more.py"),
        ("warp", False, "--srv-evidence-device is warp"),
    ],
)
def test_changed_tree_or_unknown_device_is_refused(
    checkout: Repository, tmp_path: Path, device: str, dirty: bool, reason: str
) -> None:
    more = checkout.root / "tests" / "test_more.py"
    if dirty:
        more.write_text("")
    process = run(checkout.root, f"--srv-evidence={tmp_path / 'x.jsonl'}", f"--srv-evidence-device={device}")
    more.unlink(missing_ok=True)
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert reason in process.stderr
    assert not (tmp_path / "x.jsonl").exists()


def test_evidence_of_a_changed_tree_cannot_be_committed(checkout: Repository, tmp_path: Path) -> None:
    more = checkout.root / "tests" / "test_more.py"
    more.write_text("")
    path = tmp_path / "fresh.jsonl"
    run(checkout.root, f"--srv-evidence={path}", "--srv-evidence-device=cpu", "--srv-evidence-any-tree", "-k", "one")
    more.unlink()
    (one,) = read_file(path)
    assert one.commit == checkout.head() + "+changes"
    marks = collect_marks(checkout, ["tests/test_cells.py"])
    cells = [(cell, one.platform, one.variant) for cell in one.covers]
    (fault,) = faults([one], cells, marks, checkout.is_ancestor)
    assert "its tree had uncommitted changes" in fault


def test_evidence_in_a_folder_has_one_file_per_variant(checkout: Repository) -> None:
    """Recording again does not need a commit in between, and does not overwrite the files of other machines."""
    checkout.evidence.mkdir(exist_ok=True)
    for _ in range(2):
        process = run(checkout.root, f"--srv-evidence={checkout.evidence}", "--srv-evidence-device=cpu", "-m", "covers")
        assert "evidence of 5 tests is in" in process.stdout, process.stdout + process.stderr
    (path,) = (candidate for candidate in checkout.evidence.iterdir() if candidate.name.startswith("cpu-"))
    (machine,) = {line.machine for line in read_file(path)}
    assert path.name == f"cpu-{machine}.jsonl"


def test_run_of_some_tests_keeps_the_lines_of_the_others(
    checkout: Repository, recorded: dict[str, Evidence], tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    write_file(path, [replace(line, date=LONG_AGO) for line in recorded.values()])
    whole = path.read_text()
    process = record(checkout, path, "-k", "zzz")
    assert f"no marked test of cpu was run; {path} is unchanged" in process.stdout
    assert path.read_text() == whole
    record(checkout, path, "-k", "one")
    dates = {name: line.date for name, line in ran(path).items()}
    assert dates == {**dict.fromkeys(recorded, LONG_AGO), "test_one": recorded["test_one"].date}


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ("def test_two(): raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def test_two(): pytest.exit('enough')", "enough"),
        ("@pytest.fixture\ndef broken(): 1 / 0\ndef test_two(broken): pass", "1 error"),
    ],
    ids=("interrupt", "exit", "error"),
)
def test_aborted_run_records_the_completed_tests(
    checkout: Repository, recorded: dict[str, Evidence], tmp_path: Path, more: str, outcome: str
) -> None:
    """The line of the test after it, from an earlier run, is kept."""
    mark = "from srv_matrix.pytest_plugin import covers\nimport pytest\npytestmark = covers('host', platform='cpu')\n"
    file = checkout.root / "tests" / "test_breaks.py"
    path = tmp_path / "x.jsonl"
    line = replace(recorded["test_one"], date=LONG_AGO)
    names = ("test_one", "test_two", "test_three")
    write_file(path, [replace(line, test=f"tests/test_breaks.py::{name}") for name in names])
    file.write_text(f"{mark}def test_one(): pass\n{more}\ndef test_three(): pass\n")
    process = record(checkout, path, "tests/test_breaks.py")
    file.unlink()
    assert outcome in process.stdout + process.stderr
    continued = outcome == "1 error"
    assert {name: (evidence.outcome, evidence.date == LONG_AGO) for name, evidence in ran(path).items()} == {
        "test_one": ("passed", False),
        "test_two": ("failed", False) if continued else ("passed", True),
        "test_three": ("passed", not continued),
    }


def test_skip_is_recorded_with_its_reason_only_for_comparisons(checkout: Repository, tmp_path: Path) -> None:
    path = tmp_path / "fresh.jsonl"
    process = record(checkout, path, "-k", "four or one")
    assert "evidence of 2 tests is in" in process.stdout
    assert ", 1 skipped" in process.stdout
    four = ran(path)["test_four"]
    assert (four.outcome, four.reason) == ("skipped", "not here")
    passed = replace(four, outcome="passed", reason="")
    write_file(checkout.evidence / "kept.jsonl", [passed])
    record(checkout, checkout.evidence / "kept.jsonl", "-k", "four or one")
    kept = ran(checkout.evidence / "kept.jsonl")
    (checkout.evidence / "kept.jsonl").unlink()
    assert kept.keys() == {"test_four", "test_one"}
    assert kept["test_four"] == passed


def test_file_that_is_not_evidence_is_not_overwritten(checkout: Repository, tmp_path: Path) -> None:
    path = tmp_path / "diary.txt"
    path.write_text("dear diary")
    process = record(checkout, path)
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert "diary.txt line 1" in process.stderr
    assert path.read_text() == "dear diary"


@every(
    ("test", "message"),
    [
        ("@covers('host')\ndef test_it(): pass", "must run on exactly one platform, but has none. Set one"),
        (
            "@covers('host', platform='cpu')\ndef test_it(srv_device): pass",
            "but has cpu and that of srv_device. Set one",
        ),
        (
            "@covers('host', platform='a')\n@covers('port', platform='b')\ndef test_it(): pass",
            "but has b and a. Set one",
        ),
    ],
)
def test_marked_test_must_have_exactly_one_platform(checkout: Repository, test: str, message: str) -> None:
    file = checkout.root / "tests" / "test_vague.py"
    file.write_text(f"from srv_matrix.pytest_plugin import covers\n{test}\n")
    with pytest.raises(MatrixError, match=message):
        collect_marks(checkout, ["tests/test_vague.py"])
    file.unlink()


def test_mark_needs_cells_and_a_known_level() -> None:
    with pytest.raises(ValueError, match="covers needs at least one cell"):
        covers()
    with pytest.raises(KeyError):
        covers("port", level="E9")
    with pytest.raises(ValueError, match="needs a note"):
        covers("port", variant="avx2")


def test_a_checkout_is_found_from_any_folder_in_it(checkout: Repository, tmp_path: Path) -> None:
    assert find_repository(checkout.root / "tests") == checkout
    assert find_repository(tmp_path) is None
