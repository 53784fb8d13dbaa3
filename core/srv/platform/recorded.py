"""The recorded interface of each contract version, and how two of them differ. Torch-free.

    interfaces/2.0.json ─┐
                         ├─> compare ─> Change("Platform", "added", "supports", before="", after="supports(...) -> ...")
    interfaces/2.1.json ─┘

The records are made by `srv.testing.contract_record`, by inspecting the modules. A record says what the interface is,
not what its members mean: the docstrings of `srv.platform.interface` do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

FOLDER = Path(__file__).with_name("interfaces")
CONSTANT, ALIASES, ENTRY_POINTS = "constant {}", "type aliases", "entry-point groups"
_POSITIONS, _KIND = "order of fields", "class"  # of a class; no member has such a name
_Members = dict[str, str]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """version, oldest: "2.0", of the record and of the oldest plugins that srv accepted with it. made: how it was made.

    published: the record never changes again.
    """

    version: str
    oldest: str
    published: bool
    made: str


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field of a value, or an attribute of a protocol."""

    name: str
    type: str
    default: str | None = None
    keyword_only: bool = False

    def __str__(self) -> str:
        return _declared(self.name, self.type, self.default) + (", by name only" if self.keyword_only else "")


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter of a method; `kind` is one of `inspect.Parameter`, in its words."""

    name: str
    kind: str
    type: str
    default: str | None = None


class Method(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A method without its parameter `self`."""

    parameters: tuple[Parameter, ...]
    returns: str


class Class(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One class, with the fields in the order in which its constructor takes them. `bases`: those that are recorded."""

    module: str
    kind: Literal["protocol", "dataclass", "struct", "named tuple", "class"]
    bases: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    properties: dict[str, str] = {}
    methods: dict[str, Method] = {}


class Interface(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the author of a plugin writes against.

    constants: text, or names, each with its text. optional: members of `Platform` with the capability that needs them.
    """

    header: Header
    classes: dict[str, Class]
    aliases: dict[str, str]
    constants: dict[str, str | dict[str, str]]
    optional: dict[str, str]
    entry_points: tuple[str, ...]


class Change(NamedTuple):
    """A difference between two versions. `group`: the class (or what else has members); `before` and `after`: texts."""

    group: str
    kind: Literal["added", "removed", "changed"]
    member: str
    before: str
    after: str


def recorded_versions() -> tuple[str, ...]:
    """The versions that have a record, the oldest first: ("2.0",)."""
    return tuple(sorted((path.stem for path in FOLDER.glob("*.json")), key=number))


def number(version: str) -> tuple[int, ...]:
    """The order of versions: 1.10 follows 1.9."""
    return tuple(int(part) for part in version.split("."))


def read(version: str) -> Interface:
    """The record of a version, one of `recorded_versions()`."""
    return msgspec.json.decode((FOLDER / f"{version}.json").read_bytes(), type=Interface)


def compare(old: Interface, new: Interface) -> tuple[Change, ...]:
    """All differences, by group and member. Of a class that only one version has, every member is listed."""
    before, after = _groups(old), _groups(new)
    changes: list[Change] = []
    for group in sorted({*before, *after}, key=lambda name: (name not in {*old.classes, *new.classes}, name)):
        changes += _changes(group, before.get(group, {}), after.get(group, {}))
        if group in old.classes and group in new.classes:
            changes += _moved(group, old.classes[group].fields, new.classes[group].fields)
    return tuple(changes)


def _changes(group: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for member in dict.fromkeys([*before, *after]):
        if member not in before:
            yield Change(group, "added", member, "", after[member])
        elif member not in after:
            yield Change(group, "removed", member, before[member], "")
        elif before[member] != after[member]:
            yield Change(group, "changed", member, before[member], after[member])


def _moved(group: str, before: Sequence[Field], after: Sequence[Field]) -> Iterator[Change]:
    """A field with another position: values that are passed by position would become those of other fields."""
    positions = [{field.name: index for index, field in enumerate(fields)} for fields in (before, after)]
    if any(positions[1].get(name, index) != index for name, index in positions[0].items()):
        before_text, after_text = (f"{_POSITIONS}: {', '.join(position)}" for position in positions)
        yield Change(group, "changed", _POSITIONS, before_text, after_text)


def _groups(interface: Interface) -> dict[str, _Members]:
    """Each member of each group as a text: a line of the declaration."""
    groups = {name: _members(cls) for name, cls in interface.classes.items()}
    for member, capability in interface.optional.items():
        groups["Platform"][member] += f" (needed only with the capability {capability})"
    for name, value in interface.constants.items():
        members = {name: value} if isinstance(value, str) else value
        groups[CONSTANT.format(name)] = {key: f"{key} = {text}" if text else key for key, text in members.items()}
    groups[ALIASES] = {name: f"{name} = {text}" for name, text in interface.aliases.items()}
    groups[ENTRY_POINTS] = {name: name for name in interface.entry_points}
    return groups


def _members(cls: Class) -> _Members:
    bases = f"({', '.join(cls.bases)})" if cls.bases else ""
    members = {_KIND: f"{cls.kind}{bases} in {cls.module}"}
    members |= {field.name: str(field) for field in cls.fields}
    members |= {name: f"{name}: {type_text}, a property" for name, type_text in cls.properties.items()}
    members |= {name: _signature(name, method) for name, method in cls.methods.items()}
    return members


def _signature(name: str, method: Method) -> str:
    """The declaration of a method, as Python writes it."""
    shown: list[str] = []
    kinds = [parameter.kind for parameter in method.parameters]
    for index, parameter in enumerate(method.parameters):
        if parameter.kind == "keyword-only" and not {"keyword-only", "variadic positional"} & set(kinds[:index]):
            shown.append("*")
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind, "")
        shown.append(star + _declared(parameter.name, parameter.type, parameter.default))
        if parameter.kind == "positional-only" and "positional-only" not in kinds[index + 1 :]:
            shown.append("/")
    return f"{name}({', '.join(shown)})" + (f" -> {method.returns}" if method.returns else "")


def _declared(name: str, type_text: str, default: str | None) -> str:
    return name + (f": {type_text}" if type_text else "") + ("" if default is None else f" = {default}")
