"""The tiers of tests, slices of the proof, and what is left of it (tests/helpers/tiers.py), in a temporary checkout."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from every import every
from tiers import Slice, check_tiers, longest_first, slices

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.proof(minutes=3)
@pytest.mark.parametrize("number", range(4))
def test_long(number):
    assert number != 2 or not open("broken.txt").read()

@pytest.mark.proof
@pytest.mark.xdist_group("shared")
@pytest.mark.parametrize("number", range(3))
def test_shared(number):
    pass

@pytest.mark.slow
def test_broad():
    pass

def test_fast():
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "pytest.ini": "[pytest]\nmarkers =\n  slow\n  proof\npythonpath = tests\n",
        "tests/test_it.py": TESTS,
        ".gitignore": "build\n__pycache__\n",
        "broken.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    for name in ("tiers.py", "times.py", "process_groups.py"):
        shutil.copy(ROOT / "tests" / "helpers" / name, tmp_path / "tests")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", tmp_path]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    return tmp_path


def run(checkout: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments]
    process = subprocess.run(
        command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    return process.returncode, process.stdout


def test_slices_take_equally_long_and_have_each_unit_once() -> None:
    minutes = {"a": 6.0, "b": 5.0, "c": 4.0, "d": 3.0, "e": 2.0, "f": 1.0, "g": 1.0}
    parts = slices(minutes, 3)
    assert sorted(unit for part in parts for unit in part) == sorted(minutes)
    assert sorted(sum(minutes[unit] for unit in part) for part in parts) == [7, 7, 8]
    assert slices({"only": 1.0}, 2) == [{"only"}, set()]


class Item(NamedTuple):
    """What is read of a test."""

    nodeid: str
    marks: dict[str, pytest.Mark]
    path: Path = Path(__file__)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def item(nodeid: str, minutes: float | None = None, group: str | None = None) -> Item:
    marks = {"proof": pytest.mark.proof(**({"minutes": minutes} if minutes else {})).mark}
    return Item(nodeid, marks | ({"xdist_group": pytest.mark.xdist_group(group).mark} if group else {}))


def test_slices_of_a_suite_are_a_partition_and_keep_groups_together() -> None:
    items = [item(f"long{number}", minutes=3) for number in range(4)]
    items += [item(f"shared{number}", group="one") for number in range(5)]
    parts = [Slice(number, 2).select(items) for number in range(2)]
    assert parts[0] | parts[1] == {item.nodeid for item in items}
    assert not parts[0] & parts[1]
    assert sorted(sum("shared" in test for test in part) for part in parts) == [0, 5]


def test_no_long_test_runs_alone_at_the_end() -> None:
    """Those of a group count together, in the order in which they were collected."""
    items = [item("short", 1), item("group1", 1, "one"), item("long", 4), item("group2", 2, "one"), item("none")]
    longest_first(items)
    assert [entry.nodeid for entry in items] == ["long", "group1", "group2", "short", "none"]


def test_the_slice_of_a_commit_is_in_its_hash() -> None:
    hash_ = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert Slice.parse("commit/10", ROOT) == Slice(int(hash_, 16) % 10, 10)
    assert Slice.parse("9/10", ROOT) == Slice(9, 10)


@every("text", ["3", "3/3", "-1/3", "head/3", "1/0", "commit/"])
def test_a_slice_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--slice {re.escape(text)}: "):
        Slice.parse(text, ROOT)


def test_a_test_in_two_tiers_is_refused() -> None:
    both = Item("test_both", {"slow": pytest.mark.slow.mark, "proof": pytest.mark.proof.mark})
    with pytest.raises(pytest.UsageError, match=r"a test is in one tier, .*test_both"):
        check_tiers([item("test_other"), both])


def test_a_tier_imports_only_the_files_that_say_its_mark(checkout: Path) -> None:
    (checkout / "tests" / "test_other.py").write_text("import sys\n\nsys.exit('it was imported')\n")
    assert "1 passed" in run(checkout, "--tier", "slow")[1]
    assert "it was imported" in run(checkout, "--tier", "fast")[1]


def test_a_mark_from_another_module_is_refused_by_the_run_that_imports_all(checkout: Path) -> None:
    marks = "import pytest\n\nlong = pytest.mark.slow\n"
    hidden = "import {module}\n\n@{module}.long\ndef test_hidden():\n    pass\n"
    (checkout / "tests" / "marks.py").write_text(marks)
    (checkout / "tests" / "test_hidden.py").write_text(hidden.format(module="marks"))
    assert "test_hidden.py has tests with mark.slow: say so in it" in run(checkout, "--tier", "fast")[1]
    (checkout / "tests" / "test_hidden.py").write_text(
        "from marks import long\n\n@long\ndef test_hidden():\n    pass\n"
    )
    assert "2 passed" in run(checkout, "--tier", "slow")[1]


def test_tests_of_a_group_share_a_process(checkout: Path) -> None:
    text = """
import pytest

@pytest.fixture(scope="module")
def shared():
    with open("made.txt", "a") as file:
        file.write("once ")

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(4))
def test_it(number, shared):
    pass
"""
    (checkout / "tests" / "test_group.py").write_text(text)
    status, output = run(checkout, "-n", "2", "--dist", "loadgroup", "--tier", "fast")
    assert (status, "5 passed" in output) == (0, True), output
    assert (checkout / "made.txt").read_text() == "once "


@pytest.mark.slow
def test_a_proof_goes_on_with_what_is_left(checkout: Path) -> None:
    path = checkout / "build" / "proof.json"
    proof = ("-m", "proof", "-n", "2", f"--passed={path}")
    (checkout / "broken.txt").write_text("yes")
    status, output = run(checkout, *proof)
    assert (status, "1 failed, 6 passed" in output) == (1, True), output
    assert "1 of 7 tests are left" in output
    assert "left: tests/test_it.py::test_long[2]" in output
    assert (checkout / "build" / "proof-left.txt").read_text() == "tests/test_it.py::test_long[2]\n"
    assert {tree.split(" ", 1)[1] for tree in json.loads(path.read_text()).values()} == {"with changes"}
    (checkout / "broken.txt").write_text("")
    status, output = run(checkout, *proof)
    assert (status, "1 passed" in output) == (0, True), output
    assert "0 of 7 tests are left" in output
    assert "Not all on this tree" in output
    status, output = run(checkout, *proof)
    assert (status, "0 of 7 tests are left" in output) == (0, True), output
    # A test that is new is left, however many others have passed.
    (checkout / "tests" / "test_new.py").write_text("import pytest\n\n@pytest.mark.proof\ndef test_new():\n    pass\n")
    status, output = run(checkout, *proof)
    assert (status, "1 passed" in output) == (0, True), output
