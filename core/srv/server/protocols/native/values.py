"""Reads the fields of `/generate` that have one value, or one per prompt of a batch. Must not know what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from srv.errors import RequestError
from srv.server.request.fields import json_type, shorten
from srv.server.request.sampling_fields import MAX_RID_LENGTH, MAX_SALT_LENGTH

T = TypeVar("T")


def per_prompt(value: object, count: int, batch: bool, param: str, check: Callable[[object, str], T]) -> list[T]:
    """One validated value per prompt, from a single value or a list."""
    if not isinstance(value, list):
        return [check(value, param)] * count
    if not batch:
        raise RequestError(f"{param} is an array, but there is only one prompt", code="invalid_type", param=param)
    if len(value) != count:
        raise RequestError(
            f"{param} has {len(value)} entries for {count} prompts; send one per prompt",
            code="invalid_value",
            param=param,
        )
    return [check(item, f"{param}[{index}]") for index, item in enumerate(value)]


def boolean(value: object, param: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RequestError(f"{param} must be true or false, not {json_type(value)}", code="invalid_type", param=param)


def integer_in(default: int, minimum: int, maximum: int) -> Callable[[object, str], int]:
    def check(value: object, param: str) -> int:
        if value is None:
            return default
        if type(value) is not int or not minimum <= value <= maximum:
            raise RequestError(
                f"{param} = {shorten(value)} is refused: it must be an integer from {minimum} to {maximum}",
                code="invalid_value",
                param=param,
            )
        return value

    return check


def rid_value(value: object, param: str) -> str | None:
    if value is None or (isinstance(value, str) and 0 < len(value) <= MAX_RID_LENGTH):
        return value
    raise RequestError(
        f"{param} = {shorten(value)} is refused: it must be a string of 1 to {MAX_RID_LENGTH} characters",
        code="invalid_value",
        param=param,
    )


def salt_value(value: object, param: str) -> str:
    if value is None or (isinstance(value, str) and len(value) <= MAX_SALT_LENGTH):
        return value or ""
    raise RequestError(
        f"{param} = {shorten(value)} is refused: it must be a string of at most {MAX_SALT_LENGTH} characters",
        code="invalid_value",
        param=param,
    )
