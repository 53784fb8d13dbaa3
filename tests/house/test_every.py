"""The helper of tables: all cases run, each fault is reported with its case, and fixtures reach the test."""

from __future__ import annotations

import asyncio
import os
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
def test_each_case_has_its_own_files_and_patches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "EVERY_CASE" not in os.environ
    monkeypatch.setenv("EVERY_CASE", name)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / name).touch()
    assert tmp_path_factory.getbasetemp() in tmp_path.parents


def test_coroutines_and_methods_may_be_tables() -> None:
    ran: list[int] = []

    class Tests:
        @every("number", [1, 2])
        async def table(self, number: int) -> None:
            await asyncio.sleep(0)
            ran.append(number)
            assert number != 1

    with pytest.raises(AssertionError) as caught:
        asyncio.run(Tests().table())
    assert ran == [1, 2]
    assert caught.value.__notes__ == ["in the case number=1"]


def test_a_table_that_tests_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="without cases"):
        every("name", [])
    with pytest.raises(AssertionError, match="does not take"):
        every("name", ["a"])(lambda other: None)
    with pytest.raises(AssertionError, match="each case must have a value"):
        every("name, other", [("a",)])
