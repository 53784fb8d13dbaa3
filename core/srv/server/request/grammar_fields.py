"""The fields of request bodies that constrain the output, in the forms of OpenAI, vLLM and SGLang.

Each form becomes one `GrammarSource`. Must not know how a grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import PlainValidator

from srv.errors import RequestError
from srv.grammar.source import ANY_OBJECT, GrammarSource, Kind, from_choice, from_json_schema, from_structural_tag
from srv.server.request.fields import field_error, json_type, shorten

MAX_CHOICES = 100_000
_ONE_OF = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # of `structured_outputs`


def _only(value: object, fields: Sequence[str]) -> dict[str, Any]:
    """The members of an object that are set. Raises PydanticCustomError."""
    if not isinstance(value, dict):
        raise field_error("invalid_type", f"must be an object, not {json_type(value)}")
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise field_error("invalid_value", f"must have no other fields than {', '.join(fields)}; remove {unknown[0]!r}")
    return {name: member for name, member in value.items() if member is not None}


def _schema(value: object, param: str, spacing: str | None = None, *, strict: bool = True) -> GrammarSource:
    if not isinstance(value, str | dict | bool):
        raise field_error(
            "invalid_type", f"must have a JSON schema as an object or as its text, not {json_type(value)}"
        )
    try:
        return from_json_schema(value, param=param, whitespace_pattern=spacing, strict=strict)
    except RecursionError:
        raise field_error("invalid_value", "must not be nested so deeply") from None


def _text(value: object, param: str, kind: Kind) -> GrammarSource:
    if not isinstance(value, str) or not value:
        raise field_error("invalid_type", f"must be a text that is not empty, not {json_type(value)}")
    return GrammarSource(kind=kind, text=value, param=param)


def _regex(value: object, param: str) -> GrammarSource:
    return _text(value, param, "regex")


def _grammar(value: object, param: str) -> GrammarSource:
    return _text(value, param, "grammar")


def _choice(value: object, param: str) -> GrammarSource:
    if not isinstance(value, list) or not value or not all(isinstance(element, str) and element for element in value):
        raise field_error("invalid_type", "must be an array of texts, with at least one and none empty")
    if len(value) > MAX_CHOICES:
        raise field_error("invalid_value", f"must have at most {MAX_CHOICES} texts")
    return from_choice(value, param=param)


def _tag(value: object, param: str) -> GrammarSource:
    if not isinstance(value, str | dict):
        raise field_error(
            "invalid_type", f"must be a structural tag as an object or as its text, not {json_type(value)}"
        )
    try:
        return from_structural_tag(value, param=param)
    except RecursionError:
        raise field_error("invalid_value", "must not be nested so deeply") from None


def _json_schema_of(form: dict[str, Any], place: str, param: str) -> GrammarSource:
    """The grammar of a schema with its name. `place`: where its fields are in the value, with a dot."""
    if "schema" not in form:
        raise field_error("invalid_value", f"must have the schema in {place}schema")
    if not isinstance(form.get("name", ""), str):
        raise field_error("invalid_type", f"must have a text as {place}name, not {json_type(form['name'])}")
    if not isinstance(form.get("strict", False), bool):
        raise field_error("invalid_type", f"must have true or false as {place}strict, not {json_type(form['strict'])}")
    return _schema(form["schema"], param, strict=form.get("strict", False))


def _response_format(value: object, param: str = "response_format") -> GrammarSource | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            _only(value, ("type",))
            return None
        case "json_object":
            form = _only(value, ("type", "schema"))  # the schema: of llama.cpp, Together and Fireworks
            if "schema" in form:
                return _schema(form["schema"], f"{param}.schema")
            return from_json_schema(ANY_OBJECT, param=param)
        case "json_schema":
            form = _only(value, ("type", "json_schema")).get("json_schema", {})
            if not isinstance(form, dict):
                raise field_error("invalid_type", f"must have an object as json_schema, not {json_type(form)}")
            schema_fields = _only(form, _SCHEMA_FIELDS)
            return _json_schema_of(schema_fields, "json_schema.", f"{param}.json_schema.schema")
        case "structural_tag":
            return _tag(value, param)
    raise field_error(
        "invalid_value",
        f'must be an object of type "text", "json_object", "json_schema" or "structural_tag", not {shorten(value)}',
    )


def _text_format(value: object) -> GrammarSource | None:
    """The form of OpenAI's Responses: that of `response_format` with the members of `json_schema` beside the type."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return _response_format(value, "text.format")
    return _json_schema_of(_only(value, ("type", *_SCHEMA_FIELDS)), "", "text.format.schema")


def _output_format(value: object) -> GrammarSource | None:
    """The form of Anthropic's Messages."""
    if value is None:
        return None
    form = _only(value, ("type", "schema", "name"))
    if form.get("type") != "json_schema" or "schema" not in form:
        raise field_error("invalid_value", 'must be an object of type "json_schema" with a schema')
    return _schema(form["schema"], "output_config.format.schema")


_SCHEMA_FIELDS = ("name", "schema", "strict", "description")


def _structured_outputs(value: object) -> GrammarSource:
    constraints = _only(value, (*_ONE_OF, "whitespace_pattern"))
    spacing = constraints.pop("whitespace_pattern", None)
    if spacing is not None and not isinstance(spacing, str):
        raise field_error("invalid_type", "must have a text as whitespace_pattern")
    if constraints.get("json_object") is False:
        del constraints["json_object"]
    if len(constraints) != 1:
        raise field_error("invalid_value", f"must have exactly one of {', '.join(_ONE_OF)}; it has {len(constraints)}")
    ((name, form),) = constraints.items()
    param = f"structured_outputs.{name}"
    if spacing is not None and name not in ("json", "json_object"):
        raise field_error("invalid_value", "must have whitespace_pattern only with json or json_object")
    match name:
        case "json":
            return _schema(form, param, spacing)
        case "json_object":
            return from_json_schema(ANY_OBJECT, param=param, whitespace_pattern=spacing)
        case "choice":
            return _choice(form, param)
        case "structural_tag":
            return _tag(form, param)
        case "regex":
            return _regex(form, param)
    return _grammar(form, param)


def _optional(read: Callable[[object], GrammarSource | None], schema: object) -> Any:
    """Only null asks for nothing: an empty value would be read as a grammar and constrain nothing."""

    def validate(value: object) -> GrammarSource | None:
        return None if value is None else read(value)

    return Annotated[GrammarSource | None, PlainValidator(validate, json_schema_input_type=schema)]


def _field(param: str, read: Callable[[object, str], GrammarSource], schema: object) -> Any:
    return _optional(lambda value: read(value, param), schema)


_SCHEMA_FORM = dict[str, Any] | str | None
ResponseFormat = _optional(_response_format, dict[str, Any] | None)
TextFormat = _optional(_text_format, dict[str, Any] | None)
OutputFormat = _optional(_output_format, dict[str, Any] | None)
StructuredOutputs = _optional(_structured_outputs, dict[str, Any] | None)
# An empty schema allows any JSON value.
GuidedJson = _optional(lambda value: _schema(value, "guided_json"), _SCHEMA_FORM)
GuidedRegex = _field("guided_regex", _regex, str | None)
GuidedChoice = _field("guided_choice", _choice, list[str] | None)
GuidedGrammar = _field("guided_grammar", _grammar, str | None)
JsonSchema = _optional(lambda value: _schema(value, "json_schema"), _SCHEMA_FORM)
Regex = _field("regex", _regex, str | None)
Ebnf = _field("ebnf", _grammar, str | None)
StructuralTag = _field("structural_tag", _tag, _SCHEMA_FORM)

# The fields of request bodies with these types.
GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)


def grammar_of(body: object) -> GrammarSource | None:
    """The one grammar of a request body, from whichever field has it. Raises RequestError if several do."""
    sources: list[GrammarSource] = [
        source for name in GRAMMAR_FIELDS if (source := getattr(body, name, None)) is not None
    ]
    if len(sources) > 1:
        raise RequestError(
            f"{sources[0].param} and {sources[1].param} both constrain the output; send one of them",
            code="invalid_value",
            param=sources[1].param,
        )
    spacing = getattr(body, "guided_whitespace_pattern", None)
    if spacing is None:
        return sources[0] if sources else None
    if not sources or sources[0].kind != "json_schema":
        raise RequestError(
            "guided_whitespace_pattern is refused: it needs a JSON schema, such as guided_json; send both or neither",
            code="invalid_value",
            param="guided_whitespace_pattern",
        )
    if sources[0].whitespace_pattern is not None:
        raise RequestError(
            "guided_whitespace_pattern and structured_outputs.whitespace_pattern both say what white space is allowed;"
            " send one of them",
            code="invalid_value",
            param="guided_whitespace_pattern",
        )
    return msgspec.structs.replace(sources[0], whitespace_pattern=spacing)
