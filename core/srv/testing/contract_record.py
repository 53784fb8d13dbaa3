"""Records the interface of the present contract version: everything that a plugin's author writes against.

    recorded() ─> {"classes": {"Platform": {"methods": ...}}, "constants": ..., "entry_points": ...}

It inspects the imported modules: the public classes of the contract, and the classes and aliases of `srv` that their
annotations name. `srv.platform.recorded` reads and compares the records.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from srv.platform import API_VERSION, OLDEST_API
from srv.platform.contract import OPTIONAL
from srv.platform.facts import FAMILIES
from srv.platform.registry import BACKEND_GROUP

MODULES = (
    "srv.platform.interface",
    "srv.platform.facts",
    "srv.platform.manifest",
    "srv.platform.streams",
    "srv.platform.transfers",
)
CONSTANTS_OF = ("srv.platform.facts", "srv.platform.manifest", "srv.platform.capabilities")
GROUPS = (
    ("srv.platform.registry", "PLATFORM_GROUP"),
    ("srv.models.families.architecture", "GROUP"),
    ("srv.quantization.method", "GROUP"),
    ("srv.speculative.algorithm", "GROUP"),
    ("srv.cli.main", "COMMAND_GROUP"),
)
_NOT_RECORDED = frozenset({"SINCE", "TYPE_CHECKING"})  # what an author does not write against
_DESCRIBED = frozenset({"CAPABILITIES"})  # mappings of names to prose: only the names are recorded
_WIDTH = 120

Record = dict[str, Any]


def recorded(made: str, published: bool = False) -> Record:
    """The record of the contract that is imported, as JSON-compatible values.

    made: how the record was made. published: a published version is never recorded again.
    """
    classes, aliases = _types()
    return {
        "header": {
            "version": _dotted(API_VERSION),
            "oldest": _dotted(OLDEST_API),
            "published": published,
            "made": made,
        },
        "classes": {name: describe(classes[name]) for name in sorted(classes)},
        "aliases": dict(sorted(aliases.items())),
        "constants": _constants(),
        "optional": dict(sorted(OPTIONAL.items())),
        "entry_points": _entry_points(),
    }


def text(record: Record) -> str:
    """The file of a record: keys in a fixed order, and each parameter or field on a line."""
    return _json(record, "") + "\n"


def _types() -> tuple[dict[str, type], dict[str, str]]:
    """All classes by name, and the aliases of several types, with those that the annotations name."""
    classes: dict[str, type] = {}
    aliases: dict[str, str] = {}
    waiting = [cls for name in MODULES for cls in _public_classes(importlib.import_module(name))]
    while waiting:
        cls = waiting.pop()
        if classes.setdefault(cls.__name__, cls) is not cls:
            raise ValueError(f"two classes are called {cls.__name__}: {classes[cls.__name__]} and {cls}")
        for name, value in _named_in(cls):
            alternatives = typing.get_args(value) if isinstance(value, types.UnionType) else (value,)
            if len(alternatives) > 1:
                aliases[name] = " | ".join(alternative.__name__ for alternative in alternatives)
            waiting += [
                alternative
                for alternative in alternatives
                if _is_ours(alternative) and alternative.__name__ not in classes
            ]
    return classes, aliases


def _public_classes(module: types.ModuleType) -> Iterator[type]:
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield value


def _is_ours(value: object) -> bool:
    return isinstance(value, type) and value.__module__.startswith("srv.") and not value.__name__.startswith("_")


def _named_in(cls: type) -> Iterator[tuple[str, Any]]:
    """The names in the annotations of a class, with their values in its module."""
    record, scope = describe(cls), vars(sys.modules[cls.__module__])
    texts = [field["type"] for field in record.get("fields", [])] + list(record.get("properties", {}).values())
    for method in record.get("methods", {}).values():
        texts += [parameter["type"] for parameter in method["parameters"]] + [method["returns"]]
    for node in (node for annotation in texts if annotation for node in ast.walk(ast.parse(annotation, mode="eval"))):
        if isinstance(node, ast.Name) and (_is_ours(scope.get(node.id)) or _is_alias(scope.get(node.id))):
            yield node.id, scope[node.id]


def _is_alias(value: object) -> bool:
    return isinstance(value, types.UnionType) and all(_is_ours(alternative) for alternative in typing.get_args(value))


def describe(cls: type) -> Record:
    """One class: its kind, and its fields and members as text."""
    methods, properties = {}, {}
    for name, value in sorted(vars(cls).items()):
        if isinstance(value, property) and not name.startswith("_"):
            properties[name] = _annotation(inspect.signature(value.fget).return_annotation) if value.fget else ""
        elif isinstance(value, types.FunctionType) and _is_member(cls, name, value):
            methods[name] = _method(value)
    record = {
        "module": cls.__module__,
        "kind": _kind(cls),
        "bases": [base.__name__ for base in cls.__bases__ if _is_ours(base)],
        "fields": list(_fields(cls)),
        "properties": properties,
        "methods": methods,
    }
    return {key: value for key, value in record.items() if value}


def _is_member(cls: type, name: str, function: types.FunctionType) -> bool:
    """Whether a method is part of the contract: a public one, or a special one that a protocol asks for."""
    if name.startswith("__"):
        return _is_protocol(cls) and function.__module__ == cls.__module__
    return not name.startswith("_")


def _is_protocol(cls: type) -> bool:
    return bool(vars(cls).get("_is_protocol", False))


def _kind(cls: type) -> str:
    if _is_protocol(cls):
        return "protocol"
    if dataclasses.is_dataclass(cls):
        return "dataclass"
    if hasattr(cls, "__struct_fields__"):
        return "struct"
    return "named tuple" if issubclass(cls, tuple) else "class"


def _fields(cls: type) -> Iterator[Record]:
    """The fields in the order in which a constructor takes them; of a protocol, its attributes."""
    annotations: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base is cls or not _is_protocol(cls):
            annotations |= inspect.get_annotations(base)
    defaults, keyword_only = _defaults(cls)
    for name in _field_names(cls, annotations):
        field: Record = {"name": name, "type": _annotation(annotations[name])}
        if name in defaults:
            field["default"] = defaults[name]
        if name in keyword_only:
            field["keyword_only"] = True
        yield field


def _field_names(cls: type, annotations: Mapping[str, Any]) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    names = getattr(cls, "__struct_fields__", None) or getattr(cls, "_fields", None) or annotations
    return [name for name in names if not name.startswith("_")]


def _defaults(cls: Any) -> tuple[dict[str, str], frozenset[str]]:
    """The defaults of a class's fields as text, and the fields that a constructor takes by name only."""
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        values = {field.name: _value(field.default) for field in fields if field.default is not dataclasses.MISSING}
        for field in fields:
            if field.default_factory is not dataclasses.MISSING:
                values[field.name] = f"{_value(field.default_factory)}()"
        return values, frozenset(field.name for field in fields if field.kw_only)
    if hasattr(cls, "__struct_fields__"):
        names, defaults = cls.__struct_fields__, cls.__struct_defaults__
        return dict(zip(names[len(names) - len(defaults) :], map(_value, defaults), strict=True)), frozenset()
    return {name: _value(value) for name, value in getattr(cls, "_field_defaults", {}).items()}, frozenset()


def _method(function: types.FunctionType) -> Record:
    signature = inspect.signature(function)
    parameters = []
    for argument in list(signature.parameters.values())[1:]:
        parameter: Record = {
            "name": argument.name,
            "kind": str(argument.kind.description),
            "type": _annotation(argument.annotation),
        }
        if argument.default is not inspect.Parameter.empty:
            parameter["default"] = _value(argument.default)
        parameters.append(parameter)
    return {"parameters": parameters, "returns": _annotation(signature.return_annotation)}


def _annotation(value: Any) -> str:
    """An annotation as text that does not depend on quotes, spaces or the version of Python."""
    if value is inspect.Signature.empty:
        return ""
    written = getattr(value, "__forward_arg__", value)
    if not isinstance(written, str):
        written = inspect.formatannotation(written)
    return ast.unparse(ast.parse(written, mode="eval"))


def _value(value: Any) -> str:
    """A default or constant as Python writes it; a class or function by its name."""
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)


def _constants() -> Record:
    constants: Record = {}
    for name in CONSTANTS_OF:
        for constant, value in sorted(vars(importlib.import_module(name)).items()):
            if constant.isupper() and not constant.startswith("_") and constant not in _NOT_RECORDED:
                constants[constant] = _constant(value, constant in _DESCRIBED)
    return dict(sorted(constants.items()))


def _constant(value: Any, described: bool) -> Any:
    """Text; or names, each with its text, which is empty if they stand for themselves."""
    if isinstance(value, Mapping):
        return {str(key): "" if described else _value(value[key]) for key in sorted(value)}
    if isinstance(value, tuple | frozenset):
        return {str(member): "" for member in (sorted(value) if isinstance(value, frozenset) else value)}
    return _value(value)


def _entry_points() -> list[str]:
    """The names of the groups."""
    groups = [getattr(importlib.import_module(name), constant) for name, constant in GROUPS]
    return sorted([*groups, *(f"{BACKEND_GROUP}.{family}" for family in FAMILIES)])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _json(value: Any, indent: str) -> str:
    """JSON in which whatever contains no further list or object stands on one line, if it fits."""
    nested = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    line = json.dumps(value, ensure_ascii=False)
    if not nested or (
        not any(isinstance(element, dict | list) and element for element in nested) and len(line) < _WIDTH - 20
    ):
        return line
    inner = indent + "  "
    if isinstance(value, list):
        parts = [_json(element, inner) for element in value]
        return f"[\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}]"
    parts = [f"{json.dumps(key)}: {_json(element, inner)}" for key, element in value.items()]
    return f"{{\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}}}"
