"""Request schemas as tables: every field of every request body has one status, and the same table checks.

Owns the marks `Refused` and `NoEffect`, the base class `RequestBody`, the translation of pydantic's findings
into sentences, and `field_table`, which the documentation and a test walk. Must not know any endpoint.

    implemented  changes what is done; tested
    no_effect    by its definition changes nothing that this server returns; says why
    refused      known, but not implemented: a 400 naming it, unless its value asks for nothing
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from srv.errors import RequestError

LONGEST_SUGGESTED_NAME = 64  # difflib is quadratic; a longer unknown name gets no suggestion
SHOWN_PROBLEMS = 5


def _same(left: object, right: object) -> bool:
    """Equality that tells 1, 1.0 and True apart."""
    return type(left) is type(right) and left == right


@dataclass(frozen=True, slots=True)
class Refused:
    """A field of the protocol whose feature is not implemented.

    `neutral` are the values that ask for nothing (clients send them); only they are accepted.
    """

    reason: str
    neutral: tuple[object, ...] = (None,)

    def check(self, value: object) -> object:
        if any(_same(value, neutral) for neutral in self.neutral):
            return value
        raise PydanticCustomError("not_implemented", "{reason}", {"reason": self.reason})

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.check, json_schema_input_schema=core_schema.any_schema()
        )


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A field that by its definition changes nothing in what this server returns."""

    reason: str


@dataclass(frozen=True, slots=True)
class FieldStatus:
    """One row of the table of fields."""

    name: str
    status: str  # implemented | no_effect | refused
    reason: str  # of a refused field or one without effect; else what the field does


class RequestBody(BaseModel):
    """Base of all request bodies: exact types, no unknown fields, finite numbers.

    `RENAMED` names what users of other servers send, and the field that carries its meaning here.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    RENAMED: ClassVar[dict[str, str]] = {}

    @classmethod
    def parse(cls, body: object, where: str = "") -> Self:
        """Check a decoded JSON body. Raises RequestError (400) naming every field at fault, at most five."""
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
        unknown = [name for name in body if name not in cls.model_fields]
        if not unknown:
            return
        sentences = [unknown_name(cls, name, where) for name in unknown[:SHOWN_PROBLEMS]]
        if len(unknown) > SHOWN_PROBLEMS:
            sentences.append(f"and {len(unknown) - SHOWN_PROBLEMS} more unknown fields")
        raise RequestError("; ".join(sentences), code="unknown_field", param=_join(where, shorten(unknown[0])))


def field_table(model: type[RequestBody]) -> list[FieldStatus]:
    """Name, status and reason of every field of one request body, in the order of the schema."""
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
    """The sentence for a field that does not exist, with the nearest real name."""
    shown = _join(where, shorten(name))
    if (meant := model.RENAMED.get(name)) is not None:
        return f"unknown field {shown}: here it is called {_join(where, meant)}"
    usable = [row.name for row in field_table(model) if row.status != "refused"]
    near = difflib.get_close_matches(name, usable, n=1) if len(name) <= LONGEST_SUGGESTED_NAME else []
    hint = f"did you mean {_join(where, near[0])}?" if near else "remove it"
    return f"unknown field {shown}: {hint}"


def shorten(value: object, limit: int = 80) -> str:
    """A value as a user would recognise it, cut to about `limit` characters without building it in full."""
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}... ({len(value)} characters)"
    shorter = reprlib.Repr()
    shorter.maxlevel, shorter.maxlist, shorter.maxdict, shorter.maxstring, shorter.maxlong = 2, 4, 4, limit, limit
    return shorter.repr(value)


def json_type(value: object) -> str:
    """What JSON calls the type of a value; of a value that JSON does not have, its Python type (`srv.LLM`)."""
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in ((dict, "an object"), (list, "an array"), (str, "a string"), (int, "an integer")):
        if isinstance(value, kind):
            return name
    if isinstance(value, float):
        return "a number"
    return "null" if value is None else f"a value of type {type(value).__name__}"


def field_error(kind: str, sentence: str) -> PydanticCustomError:
    """What a validator of ours raises: `sentence` says why the value will not do and what will."""
    return PydanticCustomError(kind, "{sentence}", {"sentence": sentence})


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _path(location: tuple[int | str, ...], where: str) -> str:
    path = where
    for part in location:
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
    return path


_WANTED = {
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
    """Why a value will not do, to go after "it"."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _WANTED:
        return _WANTED[kind]
    if kind in ("too_short", "string_too_short"):
        return f"must have a length of at least {context['min_length']}"
    if kind in ("too_long", "string_too_long"):
        return f"must have a length of at most {context['max_length']}"
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
    return next((found for part in get_args(annotation) if (found := _nested_body(part)) is not None), None)


def _problem(model: type[RequestBody], error: ErrorDetails, where: str) -> tuple[str, str, str]:
    """(code, path, sentence) of one finding."""
    kind, path = error["type"], _path(error["loc"], where)
    if kind == "missing":
        return "missing_field", path, f"{path} is required"
    if kind == "extra_forbidden":
        holder = _path(error["loc"][:-1], where)
        return "unknown_field", path, unknown_name(_body_at(model, error["loc"]), str(error["loc"][-1]), holder)
    if kind == "not_implemented":
        return kind, path, f"{path} is not implemented ({error['msg']}); remove the field"
    value = error["input"]
    shown = f'"{shorten(value)}"' if isinstance(value, str) else shorten(value)
    shown = {"None": "null", "True": "true", "False": "false"}.get(shown, shown)
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return code, path, f"{path} = {shown} is refused: it {_sentence(error)}"


def _as_request_error(model: type[RequestBody], error: ValidationError, where: str) -> RequestError:
    found = error.errors(include_url=False)
    problems = [_problem(model, one, where) for one in found[:SHOWN_PROBLEMS]]
    code, param, _ = problems[0]
    sentences = []
    for one, (_, _, sentence) in zip(found, problems, strict=False):
        info = model.model_fields.get(str(one["loc"][0])) if len(one["loc"]) == 1 else None
        about = info.description if info is not None and one["type"] != "not_implemented" else None
        sentences.append(f"{sentence}. {about}" if about else sentence)
    if len(found) > SHOWN_PROBLEMS:
        sentences.append(f"and {len(found) - SHOWN_PROBLEMS} more problems")
    return RequestError("; ".join(sentences), code=code, param=param)
