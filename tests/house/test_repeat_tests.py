"""`make test-flaky` finds the tests that wait, and counts which of them fail."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from repeat_tests import SLOWEST, busy, repeat, slowest_tests, waiting_tests


def test_tests_that_wait_are_found_by_their_calls_and_fixtures(tmp_path: Path) -> None:
    (tmp_path / "tests" / "core").mkdir(parents=True)
    (tmp_path / "tests" / "core" / "test_waits.py").write_text(
        """
@pytest.fixture(scope="module")
def server(): return subprocess.Popen([])
def helper(): time.sleep(1)
def test_sleeps(): time.sleep(1)
async def test_has_a_timeout(): await get(timeout=5)
def test_uses_a_server(server): ...
def test_joins_text(): ", ".join(names)
def test_calls(): helper
class TestClass:
    def test_joins_a_thread(self): thread.join()
    def test_plain(self): ...
""",
        encoding="utf-8",
    )
    names = ["test_sleeps", "test_has_a_timeout", "test_uses_a_server", "TestClass::test_joins_a_thread"]
    assert waiting_tests(tmp_path) == [f"tests/core/test_waits.py::{name}" for name in names]


def test_failures_are_counted_by_test_with_the_output_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run writes a file, so that later ones fail."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes most of a run
    (tmp_path / "test_it.py").write_text(
        """
import pathlib, pytest
@pytest.mark.parametrize("text", ["a b"])
def test_fails_again(text):
    runs = pathlib.Path("runs")
    before = runs.read_text() if runs.exists() else ""
    runs.write_text(before + "x")
    assert not before, f"run {len(before) + 1}"
def test_passes(): ...
""",
        encoding="utf-8",
    )
    repetitions = repeat(["test_it.py"], 3, root=tmp_path)
    assert dict(repetitions.failed) == {"test_it.py::test_fails_again[a b]": 2}
    assert "run 2" in repetitions.first
    assert "run 3" not in repetitions.first
    assert list(repetitions.lines())[1:] == [
        "  2 of 3 failed  test_it.py::test_fails_again[a b]",
        "1 tests failed in 3 runs",
    ]
    with pytest.raises(RuntimeError, match="status 4"):
        repeat(["test_missing.py"], 1, root=tmp_path)


def test_busy_loops_end_with_the_block() -> None:
    before = set(psutil.Process().children())
    with busy(2):
        loops = set(psutil.Process().children()) - before  # whose command lines are empty while they start
        assert len(loops) == 2
    assert not any(loop.is_running() for loop in loops)


def test_the_slowest_are_those_of_the_last_run(tmp_path: Path) -> None:
    assert slowest_tests(tmp_path) == []
    times = tmp_path / "build" / "times"
    times.mkdir(parents=True)
    (times / "2026-01-01T000000-test.jsonl").write_text('{"test": "old", "wall": 9}\n', encoding="utf-8")
    rows = "".join(f'{{"test": "t{number}", "wall": {number}}}\n' for number in range(SLOWEST + 1))
    (times / "2026-01-02T000000-test.jsonl").write_text(rows, encoding="utf-8")
    (times / "2026-01-03T000000-test-all.jsonl").write_text('{"test": "other", "wall": 9}\n', encoding="utf-8")
    assert slowest_tests(tmp_path) == [f"t{number}" for number in range(SLOWEST, 0, -1)]
