"""Checks what ends the outputs of a request: stop strings and regular expressions.

Must not know how a text is searched.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.errors import RequestError
from srv.server.request.fields import shorten
from srv.server.request.sampling_fields import Sampling
from srv.server.text.stop_regex import StopRegex


def check_stop_counts(sampling: Sampling, limit: int, field: Callable[[str], str]) -> None:
    """Raises RequestError for more stop strings, or more regular expressions, than `limit`."""
    for name, what, values in (
        ("stop", "strings", sampling.stop),
        ("stop_regex", "regular expressions", sampling.stop_regex),
    ):
        if len(values) > limit:
            raise RequestError(
                f"{field(name)} has {len(values)} {what}, the limit is {limit}; remove some",
                code="invalid_value",
                param=field(name),
            )


def compile_stops(patterns: tuple[str, ...], param: str) -> StopRegex | None:
    """The automaton of the expressions; None if there are none. Raises RequestError that names the field `param`."""
    if not patterns:
        return None
    try:
        return StopRegex(patterns)
    except RequestError as error:
        shown = shorten(patterns[0] if len(patterns) == 1 else list(patterns))
        raise RequestError(f"{param} = {shown} is refused: {error}", code=error.code, param=param) from None
