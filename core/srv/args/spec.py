"""One declaration an argument: what `Arg` says beside a field, and the `Argument` read from it.

    page_size: Annotated[int, Arg("Tokens in one page of the KV pool.", check=at_least(1))] = 1

The flag, the environment variable, the YAML key, the type, the choices, the check, the help and the
rows of docs and support matrix all come from there. Resolution and command line are not known here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from srv.args.checks import Check
from srv.args.kinds import Kind, kind_of

AUTO = "auto"  # where it is a choice, a user who says it asks for what would happen without him
HIDDEN = "(hidden)"
STATUSES = ("implemented", "planned", "deprecated")


@dataclass(frozen=True, slots=True)
class Arg:
    """What a declaration says beyond name, type and default.

    help: one sentence. check: a law on the value. choices: texts it may take (a Literal gives them too).
    family: the backend family whose registered names are its choices. needs: the capability without which
    only the default is accepted. planned: why nothing but the default is accepted yet; planned_values: further
    choices with the reason why each is not accepted yet. unit: "tokens", "bytes", "seconds". metavar: what
    help prints for the value (the unit, if not given). aliases: further names, with underscores. synonyms:
    other words for a choice. bare: what the flag means if no value follows it. secret: the value is never
    printed.
    """

    help: str
    check: Check | None = None
    choices: tuple[str, ...] = ()
    family: str | None = None
    needs: str | None = None
    planned: str | None = None
    unit: str | None = None
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()
    bare: str | None = None
    planned_values: tuple[tuple[str, str], ...] = ()
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a deprecated switch says today: `argument` takes `value`, or the value of the argument `same_as`."""

    argument: str
    value: str = ""
    same_as: str = ""

    def __str__(self) -> str:
        said = f"the value of --{self.same_as.replace('_', '-')}" if self.same_as else self.value
        return f"--{self.argument.replace('_', '-')} {said}"


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument as everybody else sees it: its declaration, read.

    spellings: names of it that other engines use and a declaration here may not (they name a device).
    old_names: names that still work, with a note. deprecated: why a switch should no longer be used; only
    those of `srv.args.config.DEPRECATED` have that, and `replaced_by` then tells what it stands for.
    """

    name: str
    group: str
    kind: Kind
    default: Any
    arg: Arg
    spellings: tuple[str, ...] = ()
    old_names: tuple[str, ...] = ()
    deprecated: str | None = None
    replaced_by: Replacement | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it has, its own first, with underscores."""
        return (self.name, *self.arg.aliases, *self.spellings, *self.old_names)

    @property
    def status(self) -> str:
        """One of `STATUSES`: what core makes of it, on any platform."""
        return "deprecated" if self.deprecated else "planned" if self.arg.planned else "implemented"

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple("--" + name.replace("_", "-") for name in self.names)

    @property
    def flag(self) -> str:
        return self.flags[0]

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "SRV_" + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """Texts that it may take, those that are only planned last; () if any text will do."""
        return (*(self.kind.choices or self.arg.choices), *(value for value, _ in self.arg.planned_values))

    @property
    def wants(self) -> str:
        """What its value must be, in words; "" if every value of the type will do."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return self.arg.check.wants if self.arg.check else ""

    def against(self, value: Any) -> str | None:
        """The reason why a value of the right type cannot be taken, a clause; None if it can."""
        if value is None:
            return None if self.kind.optional else "has no value"
        values = value if self.kind.many else (value,)
        if self.choices and any(part not in self.choices for part in values):
            return f"must be {self.wants}"
        if self.arg.check and not self.arg.check.accepts(value):
            return f"must be {self.wants}"
        return None

    def read(self, value: object) -> Any:
        """The value of a typed one (YAML, JSON), synonyms replaced; ValueError if it has the wrong type."""
        return self._canonical(self.kind.read(value))

    def parse(self, text: str) -> Any:
        """The value of a text, synonyms replaced; ValueError if it is none."""
        return self._canonical(self.kind.parse(text))

    def _canonical(self, value: Any) -> Any:
        return next((meant for word, meant in self.arg.synonyms if word == value), value)

    def why_planned(self, value: Any) -> str | None:
        """Why a value that may be right one day is not taken yet; None if it is."""
        if value == self.default:
            return None
        return self.arg.planned or next((why for word, why in self.arg.planned_values if word == value), None)

    def asks_for_automatic(self, value: Any) -> bool:
        """Whether the value is the word "auto" and means something here: that the layers below choose."""
        return bool(value == AUTO and (AUTO in self.choices or self.default == AUTO))

    def show(self, value: Any) -> str:
        """The value as a user would write it; a secret one is hidden."""
        if value is None:
            return "unset"
        if self.arg.secret:
            return HIDDEN
        if isinstance(value, bool):
            return "true" if value else "false"
        return ",".join(str(part) for part in value) if self.kind.many else str(value)


def read_group(name: str, declaration: type[NamedTuple]) -> tuple[Argument, ...]:
    """The arguments that a group declares; TypeError names a field that is not well declared."""
    hints, defaults = inspect.get_annotations(declaration), declaration._field_defaults
    return tuple(_read_field(name, field, hints[field], defaults) for field in declaration._fields)


def _read_field(group: str, field: str, hint: Any, defaults: Mapping[str, Any]) -> Argument:
    if get_origin(hint) is not Annotated or not isinstance(get_args(hint)[1], Arg):
        raise TypeError(f"{group}.{field} is not declared as Annotated[type, Arg(...)]")
    if field not in defaults:
        raise TypeError(f"{group}.{field} has no default")
    base, arg = get_args(hint)[:2]
    argument = Argument(field, group, kind_of(base), defaults[field], arg)
    against = argument.against(defaults[field])
    if against is not None:
        raise TypeError(f"{group}.{field}: its own default {against}")
    return argument


def read_groups(
    groups: Mapping[str, type[NamedTuple]],
    spellings: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    old_names: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Mapping[str, Argument]:
    """All arguments by name, in order of declaration; a name or alias used twice is a TypeError.

    `spellings` and `old_names` give further names by argument.
    """
    found: dict[str, Argument] = {}
    taken: dict[str, str] = {}
    for group, declaration in groups.items():
        for read in read_group(group, declaration):
            more, old = spellings.get(read.name, ()), old_names.get(read.name, ())
            argument = dataclasses.replace(read, spellings=more, old_names=old) if more or old else read
            for name in argument.names:
                if name in taken:
                    raise TypeError(f"{group}.{argument.name}: the name {name} belongs to {taken[name]}")
                taken[name] = f"{group}.{argument.name}"
            found[argument.name] = argument
    if unknown := (spellings.keys() | old_names.keys()) - found.keys():
        raise TypeError(f"further names are given for what is no argument: {', '.join(sorted(unknown))}")
    return MappingProxyType(found)


def nearest(word: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The name most like `word`, if any is like it at all."""
    import difflib  # for mistakes alone

    close = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return close[0] if close else None
