"""Tests that run only if the code that they cover has changed (tests/conftest.py), in a temporary checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.when_changed({path!r})
@pytest.mark.parametrize("number", [1, 2])
def test_covered(number):
    assert "broken" not in open("code/kernel.txt").read()

def test_other():
    pass
"""
Run = Callable[..., str]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "pytest.ini": "[pytest]\n",
        "code/kernel.txt": "1",
        "tests/test_it.py": TESTS.format(path="code"),
        "support_matrix/evidence/README.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(CONFTEST, tmp_path / "tests" / "conftest.py")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "-A"], check=True)
    return tmp_path


def run(checkout: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    ).stdout


@pytest.mark.slow
def test_a_test_is_skipped_until_the_code_that_it_covers_changes(checkout: Path) -> None:
    assert "3 passed" in run(checkout)  # nothing is recorded yet
    assert "3 passed" in run(checkout, "--record-digests", "-n", "2")
    again = run(checkout)
    assert "1 passed, 2 skipped" in again
    assert "the code that it covers has not changed" in again
    assert "--full runs it" in again
    assert "3 passed" in run(checkout, "--full")

    (checkout / "code" / "new.txt").write_text("not tracked yet")
    assert "3 passed" in run(checkout)
    (checkout / "code" / "new.txt").unlink()
    assert "2 skipped" in run(checkout)

    (checkout / "code" / "kernel.txt").write_text("broken")
    assert "2 failed, 1 passed" in run(checkout, "--record-digests")
    assert "2 failed, 1 passed" in run(checkout)  # failed tests are not recorded


def test_a_path_that_does_not_exist_is_an_error(checkout: Path) -> None:
    (checkout / "tests" / "test_it.py").write_text(TESTS.format(path="moved"))
    assert "when_changed: no file under moved" in run(checkout, "--record-digests")
