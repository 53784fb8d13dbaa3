"""The inputs and fields of `LLM`'s methods as request bodies, with errors that name the argument of the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from srv.errors import RequestError

Body = dict[str, object]

# Fields of a request body that only shape an HTTP response.
_HTTP_FIELDS = ("stream", "stream_options", "echo", "model", "rid", "return_token_ids")
_INPUTS = ("prompt", "messages")


def prompt_batch(prompts: object, param: str) -> list[Any]:
    """The prompts as a list, each a text or a list of token ids. Raises RequestError."""
    single = isinstance(prompts, str) or _is_token_list(prompts)
    batch = [prompts] if single else as_batch(prompts, "prompts", "a string or a list of token ids")
    for index, prompt in enumerate(batch):
        if not isinstance(prompt, str) and not _is_token_list(prompt):
            message = f"prompts[{index}] must be a string or a list of token ids, not {_described(prompt)}"
            raise RequestError(message, code="invalid_type", param=param)
    return batch


def request_bodies(
    name: str,
    batch: Sequence[object],
    fields: Mapping[str, object],
    overrides: Sequence[Mapping[str, object]] | None,
) -> list[Body]:
    """One request body per input. Raises RequestError for fields that have no meaning here."""
    if overrides is None:
        overrides = [{}] * len(batch)
    elif len(overrides) != len(batch):
        message = f"overrides has {len(overrides)} entries for {len(batch)} inputs; give one mapping per input"
        raise RequestError(message, code="invalid_value", param="overrides")
    for field in (*fields, *(field for override in overrides for field in override)):
        if field in _INPUTS:
            message = f"{field} is refused: the first argument contains all inputs; leave it out"
        elif field in _HTTP_FIELDS:
            message = f"{field} is refused: it shapes an HTTP response, and there is none; leave it out"
        else:
            continue
        raise RequestError(message, code="invalid_value", param=field)
    return [
        {field: _as_json(value) for field, value in {**fields, **override, name: item}.items()}
        for item, override in zip(batch, overrides, strict=True)
    ]


def _as_json(value: object) -> object:
    """The value as `json.dumps` would send it: lists for tuples, strings for the integer keys of mappings."""
    if isinstance(value, Mapping):
        return {str(key) if type(key) is int else key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value


def _is_token_list(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(token) is int for token in prompt)


def as_batch(inputs: object, name: str, single: str) -> list[Any]:
    """The inputs as a list. Raises RequestError for a value that is iterable by accident, or not at all."""
    if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
        message = f"{name} must be {single}, or a list of those, not {_described(inputs)}"
        raise RequestError(message, code="invalid_type", param=name)
    return list(inputs)


def _described(value: object) -> str:
    if isinstance(value, list | tuple):
        return "a list with other elements" if value else "an empty list"
    return f"a value of type {type(value).__name__}"
