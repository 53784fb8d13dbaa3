"""`every`: run a table of cases in one test, which continues after a failure and reports all failures.

    @every("text", ["1", "0x1", "one"])
    def test_no_other_spelling_is_an_integer(text: str) -> None: ...

Use it if the cases take the same path through the code and differ only in their data. Use `pytest.mark.parametrize` if
each case is a separate behaviour, starts something expensive, or must be selectable. All cases share the fixtures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: Callable[[Any], object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but as one test. A failure names its case's arguments, formatted by `ids`."""
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [case if len(arguments) > 1 else (case,) for case in cases]
    assert table, "a table without cases tests nothing"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            faults = [fault for case in table if (fault := _fault(test, fixtures, arguments, case, ids)) is not None]
            if len(faults) == 1:
                raise faults[0]
            if faults:
                raise ExceptionGroup(f"{len(faults)} of {len(table)} cases failed", faults)

        signature = inspect.signature(test)
        fixtures = [each for each in signature.parameters.values() if each.name not in arguments]
        assert len(fixtures) == len(signature.parameters) - len(arguments), f"the test does not take {arguments}"
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def _fault(
    test: Callable[..., None],
    fixtures: dict[str, Any],
    arguments: list[str],
    case: tuple[Any, ...],
    ids: Callable[[Any], object] | None,
) -> Exception | None:
    assert len(case) == len(arguments), f"{case!r} is not a case of {arguments}"
    try:
        test(**fixtures, **dict(zip(arguments, case, strict=True)))
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # each is reported at the end
        shown = ", ".join(f"{name}={(ids or repr)(value)}" for name, value in zip(arguments, case, strict=True))
        fault = error if isinstance(error, Exception) else AssertionError(str(error))
        fault.add_note(f"in the case {shown[:500]}")
        return fault
    return None
