"""`every`: a table of cases that one test runs to the end, so that a run reports all of its faults at once.

    @every("text", ["1", "0x1", "one"])
    def test_no_other_spelling_is_an_integer(text: str) -> None: ...

Use it where the cases take the same path through the code and differ in their data only. `pytest.mark.parametrize`
stays right where each case is a behaviour of its own, starts something expensive, or must be selected by itself.
Fixtures are shared by the cases of a table.
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
    """As `pytest.mark.parametrize`, in one test. A fault is named by its case's arguments, shown by `ids` if given."""
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
        kept = [each for each in signature.parameters.values() if each.name not in arguments]
        assert len(kept) == len(signature.parameters) - len(arguments), f"the test does not take {arguments}"
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
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
