"""`every`: run a table of cases in one test, which continues after a failure and reports all failures.

    @every("text", ["1", "0x1", "one"])
    def test_no_other_spelling_is_an_integer(text: str) -> None: ...

Use it if the cases take the same path through the code and differ only in their data. Use `pytest.mark.parametrize` if
each case is a separate behaviour, starts something expensive, or must be selectable. All cases share the fixtures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

FAILURES = (Exception, pytest.fail.Exception)


def every(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: Callable[[Any], object] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Like `pytest.mark.parametrize`, but as one test. A failure names its case's arguments, formatted by `ids`."""
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [case if len(arguments) > 1 else (case,) for case in cases]
    assert table, "a table without cases tests nothing"
    assert all(len(case) == len(arguments) for case in table), f"each case must have a value for each of {arguments}"

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        def labelled(error: BaseException, case: tuple[Any, ...]) -> Exception:
            shown = ", ".join(f"{name}={(ids or repr)(value)}" for name, value in zip(arguments, case, strict=True))
            fault = error if isinstance(error, Exception) else AssertionError(str(error))
            fault.add_note(f"in the case {shown[:500]}")
            return fault

        def report(faults: list[Exception]) -> None:
            if len(faults) == 1:
                raise faults[0]
            if faults:
                raise ExceptionGroup(f"{len(faults)} of {len(table)} cases failed", faults)

        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            faults = []
            for index, case in enumerate(table):
                try:
                    with _own_fixtures(fixtures, index) as kept_fixtures:
                        test(*args, **kept_fixtures, **dict(zip(arguments, case, strict=True)))
                except FAILURES as error:
                    faults.append(labelled(error, case))
            report(faults)

        @functools.wraps(test)
        async def run_async(*args: Any, **fixtures: Any) -> None:
            faults = []
            for index, case in enumerate(table):
                try:
                    with _own_fixtures(fixtures, index) as kept_fixtures:
                        await test(*args, **kept_fixtures, **dict(zip(arguments, case, strict=True)))
                except FAILURES as error:
                    faults.append(labelled(error, case))
            report(faults)

        signature = inspect.signature(test)
        others = [parameter for parameter in signature.parameters.values() if parameter.name not in arguments]
        assert len(others) == len(signature.parameters) - len(arguments), f"the test does not take {arguments}"
        chosen = run_async if inspect.iscoroutinefunction(test) else run
        chosen.__signature__ = signature.replace(parameters=others)  # type: ignore[union-attr]
        return chosen

    return decorate


@contextmanager
def _own_fixtures(fixtures: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """What a case must not share with the next: files, and changes that are undone."""
    of_case = dict(fixtures)
    with ExitStack() as stack:
        if "tmp_path" in of_case:
            of_case["tmp_path"] = of_case["tmp_path"] / str(index)
            of_case["tmp_path"].mkdir()
        if "monkeypatch" in of_case:
            of_case["monkeypatch"] = stack.enter_context(of_case["monkeypatch"].context())
        yield of_case
