"""The pytest plugin that makes evidence: in a checkout of its own, on the processor of whoever runs the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from matrix_world import git

from srv_matrix.evidence import collect_marks, faults, read_file
from srv_matrix.pytest_plugin import covers
from srv_matrix.records import Level
from srv_matrix.repository import Repository, find_repository

TESTS = """
import pytest
from srv_matrix.pytest_plugin import covers

@covers("schedule_policy=lpm")
def test_one():
    assert True

@pytest.mark.parametrize("policy", [
    pytest.param("fcfs", marks=covers("schedule_policy=fcfs", level="E2", note="forced path")), "lof",
])
def test_two(policy):
    assert policy

@covers("port")
def test_three():
    assert False

@covers("host")
def test_four():
    pytest.skip("not here")

def test_five():
    assert True

@covers("op:rms_norm/float32", variant="neon", note="forced path")
def test_six():
    assert True
"""

# A folder with hooks of its own, which pytest leaves out for the tests of others.
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


def test_marked_tests_that_ran_are_written_down(checkout: Repository) -> None:
    path = checkout.evidence / "host.jsonl"
    done = run(checkout.root, f"--srv-evidence={path}", "--srv-evidence-device=cpu")
    assert "evidence of 4 tests is in" in done.stdout, done.stdout + done.stderr
    found = {each.test.partition("::")[2]: each for each in read_file(path)}
    assert found.keys() == {"test_one", "test_two[fcfs]", "test_three", "test_six"}
    one, two = found["test_one"], found["test_two[fcfs]"]
    assert (one.covers, one.level, one.outcome) == (("schedule_policy=lpm",), Level.E4, "passed")
    assert (two.covers, two.level, two.note) == (("schedule_policy=fcfs",), Level.E2, "forced path")
    assert found["test_three"].outcome == "failed"
    assert (one.platform, one.commit) == ("cpu", checkout.head())
    assert one.variant
    assert one.device
    assert (found["test_six"].variant, found["test_six"].note) == ("neon", "forced path")


def test_what_was_written_stands_up_to_the_marks(checkout: Repository) -> None:
    marks = collect_marks(checkout, ["tests/test_cells.py", "tests/test_gone.py"])
    assert marks["tests/test_cells.py::test_two[fcfs]"]["covers"] == ["schedule_policy=fcfs"]
    assert "tests/test_cells.py::test_two[lof]" not in marks
    path = checkout.evidence / "host.jsonl"
    run(checkout.root, f"--srv-evidence={path}", "--srv-evidence-device=cpu", "-k", "one")
    (one,) = read_file(path)
    cells = [(cell, one.platform, one.variant) for cell in one.covers]
    assert faults([one], cells, marks, checkout.is_ancestor) == []
    assert not checkout.is_ancestor("0" * 40)


def test_what_a_simulated_device_shows_is_e3_at_most(checkout: Repository, tmp_path: Path) -> None:
    path = tmp_path / "toy.jsonl"
    done = run(checkout.root, f"--srv-evidence={path}", "--srv-evidence-device=toy")
    assert path.exists(), done.stderr
    found = {each.test.partition("::")[2]: each.level for each in read_file(path)}
    assert (found["test_one"], found["test_two[fcfs]"]) == (Level.E3, Level.E2)


def test_nothing_is_written_unless_asked(checkout: Repository) -> None:
    done = run(checkout.root)
    assert "1 failed, 6 passed, 1 skipped" in done.stdout
    assert "evidence" not in done.stdout


@pytest.mark.parametrize(
    ("device", "dirty", "reason"),
    [
        ("cpu", True, "commit first, the tree differs: tests/test_more.py"),
        ("warp", False, "--srv-evidence-device is warp"),
    ],
)
def test_evidence_of_nothing_in_particular_is_refused(
    checkout: Repository, tmp_path: Path, device: str, dirty: bool, reason: str
) -> None:
    more = checkout.root / "tests" / "test_more.py"
    if dirty:
        more.write_text("")
    done = run(checkout.root, f"--srv-evidence={tmp_path / 'x.jsonl'}", f"--srv-evidence-device={device}")
    more.unlink(missing_ok=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert reason in done.stderr
    assert not (tmp_path / "x.jsonl").exists()


def test_a_run_for_comparison_takes_any_tree_and_can_never_be_committed(checkout: Repository, tmp_path: Path) -> None:
    more = checkout.root / "tests" / "test_more.py"
    more.write_text("")
    path = tmp_path / "fresh.jsonl"
    run(checkout.root, f"--srv-evidence={path}", "--srv-evidence-device=cpu", "--srv-evidence-any-tree", "-k", "one")
    more.unlink()
    (one,) = read_file(path)
    assert one.commit == checkout.head() + "+changes"
    marks = collect_marks(checkout, ["tests/test_cells.py"])
    cells = [(cell, one.platform, one.variant) for cell in one.covers]
    (told,) = faults([one], cells, marks, checkout.is_ancestor)
    assert "its tree was not that of a commit" in told


def test_evidence_in_a_folder_has_a_file_a_variant_and_dirties_no_tree(checkout: Repository) -> None:
    """So recording again, or on another machine, overwrites nothing of others and needs no commit in between."""
    checkout.evidence.mkdir(exist_ok=True)
    for _ in range(2):
        done = run(checkout.root, f"--srv-evidence={checkout.evidence}", "--srv-evidence-device=cpu", "-m", "covers")
        assert "evidence of 4 tests is in" in done.stdout, done.stdout + done.stderr
    (path,) = (each for each in checkout.evidence.iterdir() if each.name.startswith("cpu-"))
    (variant,) = {each.variant for each in read_file(path) if not each.note}
    assert path.name == f"cpu-{variant}.jsonl"


def test_a_mark_names_cells_and_a_level() -> None:
    with pytest.raises(ValueError, match="covers nothing"):
        covers()
    with pytest.raises(KeyError):
        covers("port", level="E9")
    with pytest.raises(ValueError, match="wants a note"):
        covers("port", variant="avx2")


def test_a_checkout_is_found_from_any_folder_in_it(checkout: Repository, tmp_path: Path) -> None:
    assert find_repository(checkout.root / "tests") == checkout
    assert find_repository(tmp_path) is None
