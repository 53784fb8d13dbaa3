"""Request schemas, in which every field of every request body has a status.

Owns the annotations `Refused` and `NoEffect`, the base class `RequestBody`, the error messages for pydantic's
validation errors, and `field_table`, which the tests read. Must not know any endpoint.

    implemented  has an effect; tested
    no_effect    by definition changes nothing that this server returns; has a reason
    refused      known, but not implemented: a 400 that names it

A field that is refused or unknown is taken if its value asks for nothing (`srv.server.request.neutral`).
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from srv.errors import RequestError
from srv.server.request.neutral import is_neutral

MAX_SUGGESTION_LENGTH = 64  # difflib is quadratic; a longer unknown name gets no suggestion
MAX_REPORTED_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class Refused:
    """A field of the protocol whose feature is not implemented. `code`: of the error."""

    reason: str
    code: str = "not_implemented"

    def check(self, value: object) -> object:
        raise PydanticCustomError("not_implemented", "{reason}", {"reason": self.reason, "code": self.code})

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.check, json_schema_input_schema=core_schema.any_schema()
        )


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A field that by definition changes nothing that this server returns."""

    reason: str


@dataclass(frozen=True, slots=True)
class FieldStatus:
    """One row of `field_table`."""

    name: str
    status: str  # implemented | no_effect | refused
    reason: str  # why it is refused or has no effect; for an implemented field, its description


class RequestBody(BaseModel):
    """Base of all request bodies: strict types, no unknown fields, finite numbers.

    `RENAMED` maps field names of other servers to the equivalent field of this one.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    RENAMED: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: object) -> object:
        """The body without fields that are not implemented and whose value asks for nothing."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if cls._is_implemented(name) or not is_neutral(name, value)}

    @classmethod
    def _is_implemented(cls, name: str) -> bool:
        info = cls.model_fields.get(name)
        return info is not None and not any(isinstance(mark, Refused) for mark in info.metadata)

    @classmethod
    def parse(cls, body: object, where: str = "") -> Self:
        """Validate a decoded JSON body. Raises RequestError (400) that names all invalid fields, at most five."""
        if not isinstance(body, dict):
            place = where or "the body"
            raise RequestError(
                f"{place} must be a JSON object, not {json_type(body)}", code="invalid_type", param=where or None
            )
        cls._refuse_unknown(body, where)
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _as_request_error(cls, error, where) from None

    @classmethod
    def _refuse_unknown(cls, body: dict[str, object], where: str) -> None:
        unknown = [name for name, value in body.items() if name not in cls.model_fields and not is_neutral(name, value)]
        if not unknown:
            return
        sentences = [unknown_name(cls, name, where) for name in unknown[:MAX_REPORTED_PROBLEMS]]
        if len(unknown) > MAX_REPORTED_PROBLEMS:
            sentences.append(f"and {len(unknown) - MAX_REPORTED_PROBLEMS} more unknown fields")
        raise RequestError("; ".join(sentences), code="unknown_field", param=_join(where, shorten(unknown[0])))


def field_table(model: type[RequestBody]) -> list[FieldStatus]:
    """Name, status and reason of every field of a request body, in the order of the schema."""
    rows = []
    for name, info in model.model_fields.items():
        marks = [mark for mark in info.metadata if isinstance(mark, Refused | NoEffect)]
        if not marks:
            rows.append(FieldStatus(name, "implemented", info.description or ""))
        else:
            status = "refused" if isinstance(marks[0], Refused) else "no_effect"
            rows.append(FieldStatus(name, status, marks[0].reason))
    return rows


def unknown_name(model: type[RequestBody], name: str, where: str) -> str:
    """The message for a field that does not exist, with the closest existing name."""
    shown = _join(where, shorten(name))
    if (field := model.RENAMED.get(name)) is not None:
        return f"unknown field {shown}: it is called {_join(where, field)} here"
    usable = [row.name for row in field_table(model) if row.status != "refused"]
    near = difflib.get_close_matches(name, usable, n=1) if len(name) <= MAX_SUGGESTION_LENGTH else []
    hint = f"did you mean {_join(where, near[0])}?" if near else "remove it"
    return f"unknown field {shown}: {hint}"


def shorten(value: object, limit: int = 80) -> str:
    """The repr of a value (a string as it is), truncated to about `limit` characters without building all of it."""
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}... ({len(value)} characters)"
    shorter = reprlib.Repr()
    shorter.maxlevel, shorter.maxlist, shorter.maxdict, shorter.maxstring, shorter.maxlong = 2, 4, 4, limit, limit
    return shorter.repr(value)


def json_type(value: object) -> str:
    """The JSON type of a value, or its Python type if JSON has none (`srv.LLM`)."""
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in ((dict, "an object"), (list, "an array"), (str, "a string"), (int, "an integer")):
        if isinstance(value, kind):
            return name
    if isinstance(value, float):
        return "a number"
    return "null" if value is None else f"a value of type {type(value).__name__}"


def field_error(kind: str, sentence: str) -> PydanticCustomError:
    """The error of a custom validator: `sentence` says what the value must be."""
    return PydanticCustomError(kind, "{sentence}", {"sentence": sentence})


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _path(location: tuple[int | str, ...], where: str) -> str:
    path = where
    for part in location:
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
    return path


_REQUIREMENTS = {
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "finite_number": "must be a finite number",
    "missing": "is required",
}


def _sentence(error: ErrorDetails) -> str:
    """The requirement that a value does not meet, as a sentence that follows "it"."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _REQUIREMENTS:
        return _REQUIREMENTS[kind]
    if kind in ("too_short", "string_too_short"):
        return f"must have a length of at least {context['min_length']}"
    if kind in ("too_long", "string_too_long"):
        return f"must have a length of at most {context['max_length']}"
    if kind == "string_pattern_mismatch":
        return f"must match the pattern {context['pattern']}"
    return error["msg"].replace("Input should be", "must be").replace("'", '"')


def _body_at(model: type[RequestBody], location: tuple[int | str, ...]) -> type[RequestBody]:
    """The nested schema in which the last part of `location` is a field."""
    for part in location[:-1]:
        if isinstance(part, str):
            nested = _nested_body(model.model_fields[part].annotation)
            if nested is not None:
                model = nested
    return model


def _nested_body(annotation: object) -> type[RequestBody] | None:
    if isinstance(annotation, type) and issubclass(annotation, RequestBody):
        return annotation
    return next((body for part in get_args(annotation) if (body := _nested_body(part)) is not None), None)


def _problem(model: type[RequestBody], error: ErrorDetails, where: str) -> tuple[str, str, str]:
    """(code, path, sentence) of one validation error."""
    kind, path = error["type"], _path(error["loc"], where)
    if kind == "missing":
        return "missing_field", path, f"{path} is required"
    if kind == "extra_forbidden":
        holder = _path(error["loc"][:-1], where)
        return "unknown_field", path, unknown_name(_body_at(model, error["loc"]), str(error["loc"][-1]), holder)
    if kind == "not_implemented":
        code = error.get("ctx", {}).get("code", kind)
        return code, path, f"{path} is not implemented ({error['msg']}); remove the field"
    if kind == "part_not_implemented":  # of an array, whose items have no fields here
        return "not_implemented", f"{path}[{error['ctx']['index']}].type", path + error["msg"]
    value = error["input"]
    shown = f'"{shorten(value)}"' if isinstance(value, str) else shorten(value)
    shown = {"None": "null", "True": "true", "False": "false"}.get(shown, shown)
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return code, path, f"{path} = {shown} is refused: it {_sentence(error)}"


def _as_request_error(model: type[RequestBody], error: ValidationError, where: str) -> RequestError:
    details = error.errors(include_url=False)
    problems = [_problem(model, detail, where) for detail in details[:MAX_REPORTED_PROBLEMS]]
    code, param, _ = problems[0]
    sentences = []
    for detail, (_, _, sentence) in zip(details, problems, strict=False):
        info = model.model_fields.get(str(detail["loc"][0])) if len(detail["loc"]) == 1 else None
        about = info.description if info is not None and detail["type"] != "not_implemented" else None
        sentences.append(f"{sentence}. {about}" if about else sentence)
    if len(details) > MAX_REPORTED_PROBLEMS:
        sentences.append(f"and {len(details) - MAX_REPORTED_PROBLEMS} more problems")
    *before, last = sentences
    text = "".join(f"{clause} " if clause.endswith(".") else f"{clause}; " for clause in before) + last
    return RequestError(text, code=code, param=param)
