"""The helper of tables: all cases run, each fault is reported with its case, and fixtures reach the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from every import every


def test_every_case_runs_and_every_fault_is_reported() -> None:
    ran: list[tuple[int, str]] = []

    @every("number", [1, 2, 3])
    @every("text", "ab")
    def table(number: int, text: str) -> None:
        ran.append((number, text))
        assert number != 2
        assert (number, text) != (3, "b")

    with pytest.raises(ExceptionGroup) as caught:
        table()
    assert ran == [(number, text) for number in (1, 2, 3) for text in "ab"]
    both, one = caught.value.exceptions
    assert isinstance(both, ExceptionGroup)
    assert both.__notes__ == ["in the case number=2"]
    assert [fault.__notes__ for fault in both.exceptions] == [["in the case text='a'"], ["in the case text='b'"]]
    assert one.__notes__ == ["in the case text='b'", "in the case number=3"]


def test_an_exception_that_was_not_raised_is_a_fault() -> None:
    @every(("value", "message"), [(1, "no"), ("1", "yes")], ids=str)
    def table(value: object, message: str) -> None:
        with pytest.raises(TypeError):
            len(value)  # type: ignore[arg-type]

    with pytest.raises(AssertionError, match="DID NOT RAISE") as caught:
        table()
    assert caught.value.__notes__ == ["in the case value=1, message=yes"]


@every("name", ["a", "b"])
def test_fixtures_reach_the_test(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert (tmp_path / "a").exists()


def test_a_table_that_tests_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="without cases"):
        every("name", [])
    with pytest.raises(AssertionError, match="does not take"):
        every("name", ["a"])(lambda other: None)
