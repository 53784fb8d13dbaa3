"""One declaration per argument: the `Arg` annotation of a field, and the `Argument` built from it.

    page_size: Annotated[int, Arg("Tokens in one page of the KV pool.", check=at_least(1))] = 1

The flag, the environment variable, the YAML key, the type, the choices, the check, the help text and the rows of
the docs and of the support matrix are all derived from it. This module must not know resolution or the command line.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from srv.args.checks import ValueCheck
from srv.args.kinds import Kind, kind_of

AUTO = "auto"  # where it is a choice, it selects the value that srv would choose if the user set nothing
HIDDEN = "(hidden)"
STATUSES = ("implemented", "planned", "deprecated")


@dataclass(frozen=True, slots=True)
class Arg:
    """The part of a declaration beyond name, type and default.

    help: one sentence. check: a constraint on the value. choices: the allowed strings, if the type is not a Literal.
    further_choices: those that documentation does not list, among them what other installed distributions add.
    family: the backend family whose registered names are the choices. needs: the capability without which
    only the default is accepted. only_with: arguments of which one must differ from its default, because a value has
    no effect otherwise (`srv.args.prerequisites`). read_by: the family of the backends that alone read it, if their
    specs name it in `BackendSpec.arguments`; with others, a user's value is refused (`srv.args.backend_arguments`).
    planned: the reason why only the default is accepted so far.
    planned_values: further choices, each with the reason why it is not accepted yet. unit: "tokens", "bytes",
    "seconds". metavar: the placeholder of the value in help texts (default: the unit). aliases: further names, with
    underscores. synonyms: pairs (synonym, choice). const: the value that the flag sets if no value follows it, as in
    argparse. secret: the value is never printed.
    """

    help: str
    check: ValueCheck | None = None
    choices: tuple[str, ...] = ()
    further_choices: Callable[[], tuple[str, ...]] | None = None
    family: str | None = None
    needs: str | None = None
    only_with: tuple[str, ...] = ()
    read_by: str | None = None
    planned: str | None = None
    unit: str | None = None
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()
    const: str | None = None
    planned_values: tuple[tuple[str, str], ...] = ()
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """What replaces a deprecated switch: `argument` is set to `value`, or to the value of the argument `same_as`."""

    argument: str
    value: str = ""
    same_as: str = ""

    def __str__(self) -> str:
        value = f"the value of --{self.same_as.replace('_', '-')}" if self.same_as else self.value
        return f"--{self.argument.replace('_', '-')} {value}"


@dataclass(frozen=True, slots=True)
class Argument:
    """A server argument, built from its declaration.

    spellings: aliases that name a device or its vendor, which a declaration in core must not contain.
    old_names: former names, which still work and log a note. deprecated: why a switch should no longer be used;
    only the switches in `srv.args.config.DEPRECATED` set it, together with `replaced_by`.
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
        """All names of the argument, with underscores; the declared name comes first."""
        return (self.name, *self.arg.aliases, *self.spellings, *self.old_names)

    @property
    def status(self) -> str:
        """The status in core, whatever the platform: one of `STATUSES`."""
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
        """The allowed strings, planned ones last; () if any string is allowed."""
        return (*self.kind.choices, *(value for value, _ in self.arg.planned_values))

    @property
    def further_choices(self) -> tuple[str, ...]:
        """The strings that other installed distributions allow in addition."""
        further = self.arg.further_choices() if self.arg.further_choices else ()
        return tuple(choice for choice in further if choice not in self.choices)

    @property
    def implemented_choices(self) -> tuple[str, ...]:
        """The allowed strings that are implemented, by `srv` or by another distribution; () if any is allowed."""
        return (*self.kind.choices, *self.further_choices)

    @property
    def expected(self) -> str:
        """A phrase that completes "must be ..."; "" if every value of the type is valid."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return self.arg.check.expected if self.arg.check else ""

    def validation_error(self, value: Any) -> str | None:
        """A clause that says why a value of the right type is invalid ("must be at least 1"); None if it is valid."""
        if value is None:
            return None if self.kind.optional else "has no value"
        values, choices = value if self.kind.many else (value,), self.choices
        if choices and any(member not in choices for member in values):
            further = self.further_choices
            if any(member not in (*choices, *further) for member in values):
                return f"must be {', '.join((self.expected, *further))}"
        if self.arg.check and not self.arg.check.accepts(value):
            return f"must be {self.expected}"
        return None

    def read(self, value: object) -> Any:
        """Convert a typed value (from YAML or JSON) and replace synonyms; ValueError if it has the wrong type."""
        return self._canonical(self.kind.read(value))

    def parse(self, text: str) -> Any:
        """Parse a string and replace synonyms; ValueError if the string is not a value of this type."""
        return self._canonical(self.kind.parse(text))

    def _canonical(self, value: Any) -> Any:
        return next((choice for synonym, choice in self.arg.synonyms if synonym == value), value)

    def planned_reason(self, value: Any) -> str | None:
        """Why a value is planned but not accepted yet; None if it is accepted."""
        if value == self.default:
            return None
        return self.arg.planned or next(
            (reason for planned, reason in self.arg.planned_values if planned == value), None
        )

    def asks_for_automatic(self, value: Any) -> bool:
        """Whether the value is "auto", which lets a lower layer choose, and this argument supports it."""
        return bool(value == AUTO and (AUTO in self.choices or self.default == AUTO))

    def show(self, value: Any) -> str:
        """The value as a user would write it; a secret value is hidden."""
        if value is None:
            return "unset"
        if self.arg.secret:
            return HIDDEN
        if isinstance(value, bool):
            return "true" if value else "false"
        return ",".join(str(member) for member in value) if self.kind.many else str(value)


def read_group(name: str, declaration: type[NamedTuple]) -> tuple[Argument, ...]:
    """The arguments that a group declares; TypeError names a field whose declaration is malformed."""
    hints, defaults = inspect.get_annotations(declaration, eval_str=True), declaration._field_defaults
    return tuple(_read_field(name, field, hints[field], defaults) for field in declaration._fields)


def _read_field(group: str, field: str, hint: Any, defaults: Mapping[str, Any]) -> Argument:
    if get_origin(hint) is not Annotated or not isinstance(get_args(hint)[1], Arg):
        raise TypeError(f"{group}.{field} is not declared as Annotated[type, Arg(...)]")
    if field not in defaults:
        raise TypeError(f"{group}.{field} has no default")
    base, arg = get_args(hint)[:2]
    kind = kind_of(base)
    kind = dataclasses.replace(kind, choices=arg.choices) if arg.choices else kind
    argument = Argument(field, group, kind, defaults[field], arg)
    error = argument.validation_error(defaults[field])
    if error is not None:
        raise TypeError(f"{group}.{field}: its own default {error}")
    return argument


def read_groups(
    groups: Mapping[str, type[NamedTuple]],
    spellings: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    old_names: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Mapping[str, Argument]:
    """All arguments by name, in order of declaration; a duplicate name or alias raises TypeError.

    `spellings` and `old_names` add further names; both are keyed by argument.
    """
    arguments: dict[str, Argument] = {}
    name_owners: dict[str, str] = {}
    for group, declaration in groups.items():
        for declared in read_group(group, declaration):
            further, old = spellings.get(declared.name, ()), old_names.get(declared.name, ())
            argument = dataclasses.replace(declared, spellings=further, old_names=old)
            for name in argument.names:
                if name in name_owners:
                    raise TypeError(f"{group}.{argument.name}: the name {name} belongs to {name_owners[name]}")
                name_owners[name] = f"{group}.{argument.name}"
            arguments[argument.name] = argument
    if unknown := (spellings.keys() | old_names.keys()) - arguments.keys():
        raise TypeError(f"further names are given for unknown arguments: {', '.join(sorted(unknown))}")
    return MappingProxyType(arguments)


def nearest(word: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The name most similar to `word`; None if no similarity reaches `cutoff` (0 to 1)."""
    import difflib  # slow to import, and needed only after a typo

    close = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return close[0] if close else None
