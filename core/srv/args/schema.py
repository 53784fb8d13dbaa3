"""A JSON Schema of the configuration file, from which editors complete and check it.

Made from the declarations alone. What a schema cannot say (a platform's word, one argument against another) is left
to resolution.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from srv.args.config import ARGUMENTS, DEPRECATED, SPELLINGS
from srv.args.spec import Argument

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}


def make_schema() -> dict[str, Any]:
    """The schema of a file for `--config`: a mapping from argument names to values, and nothing else."""
    properties: dict[str, Any] = {}
    for argument in (*ARGUMENTS.values(), *DEPRECATED.values()):
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
    one = _one(argument)
    law = dict(argument.arg.check.schema) if argument.arg.check else {}
    if kind.many:
        items = {**one, **law.pop("items", {})}
        made: dict[str, Any] = {"type": "array", "items": items, **law}
    else:
        made = {**one, **law}
    made["description"] = _description(argument)
    if argument.default is not None:
        made["default"] = kind.dump(argument.default)
    if argument.deprecated:
        made["deprecated"] = True
    return made


def _one(argument: Argument) -> dict[str, Any]:
    """The schema of a single value."""
    made: dict[str, Any] = {"type": _TYPES[argument.kind.base]}
    if argument.choices:
        made["enum"] = [*argument.choices, *(word for word, _ in argument.arg.synonyms)]
    elif published := SPELLINGS.published.get(argument.name):
        made["examples"] = list(published)
    return made


def _description(argument: Argument) -> str:
    told = argument.arg.help
    if argument.arg.unit:
        told += f" Unit: {argument.arg.unit}."
    if argument.arg.planned:
        told += f" Planned: {argument.arg.planned}."
    for value, why in argument.arg.planned_values:
        told += f" Not yet {value}: {why}."
    return told + (f" Deprecated: {argument.deprecated}." if argument.deprecated else "")
