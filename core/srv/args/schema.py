"""A JSON Schema of the configuration file, with which editors complete and validate it.

It is generated from the declarations alone. Resolution checks what a schema cannot express, such as the constraints of
a platform or between two arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from srv.args.config import DEPRECATED, SPELLINGS, all_arguments
from srv.args.spec import Argument

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}


def make_schema() -> dict[str, Any]:
    """The schema of a file for `--config`: a mapping from argument names to values, and nothing else."""
    properties: dict[str, Any] = {}
    for argument in (*all_arguments().values(), *DEPRECATED.values()):
        properties[argument.name] = _property(argument)
        for name in argument.names[1:]:
            properties[name] = {"$ref": f"#/properties/{argument.name}"}
            if name in argument.old_names:
                properties[name]["deprecated"] = True
    return {
        "$schema": DIALECT,
        "title": "Arguments of srv",
        "description": "A configuration file for `srv launch --config FILE` and `srv plan --config FILE`.",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _property(argument: Argument) -> dict[str, Any]:
    kind = argument.kind
    single = _single_value(argument)
    check = dict(argument.arg.check.schema) if argument.arg.check else {}
    if kind.many:
        items = {**single, **check.pop("items", {})}
        schema: dict[str, Any] = {"type": "array", "items": items, **check}
    else:
        schema = {**single, **check}
    schema["description"] = _description(argument)
    if argument.default is not None:
        schema["default"] = kind.dump(argument.default)
    if argument.deprecated:
        schema["deprecated"] = True
    return schema


def _single_value(argument: Argument) -> dict[str, Any]:
    """The schema of a single value."""
    schema: dict[str, Any] = {"type": _TYPES[argument.kind.base]}
    if argument.choices:
        schema["enum"] = [*argument.choices, *(synonym for synonym, _ in argument.arg.synonyms)]
    elif published := SPELLINGS.published.get(argument.name):
        schema["examples"] = list(published)
    return schema


def _description(argument: Argument) -> str:
    text = argument.arg.help
    if argument.arg.unit:
        text += f" Unit: {argument.arg.unit}."
    if argument.arg.planned:
        text += f" Planned: {argument.arg.planned}."
    for value, reason in argument.arg.planned_values:
        text += f" Not yet {value}: {reason}."
    return text + (f" Deprecated: {argument.deprecated}." if argument.deprecated else "")
