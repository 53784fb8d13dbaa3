"""The prompts in a request body: texts, or token ids. Must not know the model."""

from __future__ import annotations

from srv.errors import RequestError
from srv.server.request.fields import json_type

Prompt = str | list[int]


def read_prompts(value: object, param: str) -> tuple[list[Prompt], bool]:
    """The prompts of a request, and whether they are a batch. Raises RequestError."""
    if isinstance(value, str):
        return [value], False
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return [value], False
        if kinds == {str}:
            return list(value), True
        if kinds == {list}:
            return [_token_list(ids, f"{param}[{index}]") for index, ids in enumerate(value)], True
        raise RequestError(
            f"{param} must be a string, an array of strings, of token ids (integers), or of arrays of token ids;"
            f" it contains {_json_types(value)}",
            code="invalid_type",
            param=param,
        )
    if isinstance(value, list):
        raise RequestError(f"{param} = [] is refused: it has no tokens", code="empty_prompt", param=param)
    raise RequestError(
        f"{param} must be a string or an array, not {json_type(value)}", code="invalid_type", param=param
    )


def _json_types(value: list[object]) -> str:
    return " and ".join(sorted({json_type(item) for item in value}))


def _token_list(ids: list[object], param: str) -> list[int]:
    if set(map(type, ids)) - {int}:
        raise RequestError(f"{param} must contain only token ids (integers)", code="invalid_type", param=param)
    return ids  # type: ignore[return-value]
