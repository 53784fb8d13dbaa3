"""Statements about arguments (value, owner, reason), and the provenance of each value after resolution.

Plain values only: this module must not know how statements are gathered or which of them wins.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from srv.args.config import Config, argument_named
from srv.errors import Rejection
from srv.platform.registry import ProvidedBackend

if TYPE_CHECKING:
    from srv.platform.facts import BackendSpec, DeviceFacts


class Layer(enum.IntEnum):
    """The layer of a statement: the highest layer wins."""

    GENERIC = 0
    MODEL = 1
    PLATFORM = 2
    BACKEND = 3
    USER = 4


class Origin(enum.IntEnum):
    """Where a user set a value: the highest origin wins within the layer USER."""

    CONFIG_FILE = 0
    ENVIRONMENT = 1
    COMMAND_LINE = 2  # and the keyword arguments of `srv.LLM`, which has no command line


class UserStatement(NamedTuple):
    """One value that the user gave, of the argument's type.

    `source`: for example "config file a.yaml line 3". `name`: the alias by which the user set the argument; "" for its
    declared name. `argument` may be a deprecated switch until `srv.args.deprecated` has translated it.
    """

    argument: str
    value: Any
    origin: Origin
    source: str
    name: str = ""


class UserInput(NamedTuple):
    """Everything that the user set: valid statements, rejections of invalid input, and notes to log as warnings."""

    statements: tuple[UserStatement, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()

    def value(self, argument: str) -> Any:
        """The user's value of an argument, or None. Used before resolution, to find the device and the model."""
        strongest = max((s for s in self.statements if s.argument == argument), key=lambda s: s.origin, default=None)
        return strongest.value if strongest else None


class Statement(NamedTuple):
    """A value for an argument, with its layer, its owner and its reason (the clause after "because").

    `reads`: the arguments and quantities that the value was computed from.
    """

    argument: str
    value: Any
    layer: Layer
    owner: str
    reason: str
    origin: Origin = Origin.COMMAND_LINE
    reads: tuple[str, ...] = ()


class Provenance(NamedTuple):
    """Why an argument has its value. `overridden`: the statements that lost, strongest first."""

    argument: str
    value: Any
    owner: str
    layer: Layer
    reason: str
    overridden: tuple[Statement, ...] = ()

    def __str__(self) -> str:
        show = argument_named(self.argument).show
        lines = [f"{self.argument} = {show(self.value)} because {self.reason}"]
        lines += [
            f"    overridden: {show(statement.value)} because {statement.reason}" for statement in self.overridden
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The provenance as JSON-compatible values; a secret value is hidden. Clients read these keys."""
        return {
            "value": _printable(self.argument, self.value),
            "layer": self.layer.name.lower(),
            "owner": self.owner,
            "because": self.reason,
            "shadowed": [
                {
                    "value": _printable(statement.argument, statement.value),
                    "layer": statement.layer.name.lower(),
                    "owner": statement.owner,
                    "because": statement.reason,
                }
                for statement in self.overridden
            ],
        }


def _printable(name: str, value: Any) -> Any:
    argument = argument_named(name)
    return argument.show(value) if argument.arg.secret and value is not None else argument.kind.dump(value)


class QuantityPart(NamedTuple):
    """One computed contribution to a quantity. `for_default`: as of `srv.platform.facts.Contribution`."""

    name: str
    owner: str
    amount: float
    reason: str
    for_default: bool = False


class Quantity(NamedTuple):
    """A sum of parts from several owners."""

    name: str
    unit: str
    parts: tuple[QuantityPart, ...] = ()

    @property
    def total(self) -> float:
        return sum(part.amount for part in self.parts)

    def __str__(self) -> str:
        lines = [f"{self.name} = {amount_text(self.total, self.unit)}"]
        lines += [
            f"    {part.name}: {amount_text(part.amount, self.unit)} ({part.owner}) because {part.reason}"
            for part in self.parts
            if part.amount
        ]
        return "\n".join(lines)


class BackendChoice(NamedTuple):
    """The backend chosen for one slot, with the reason. `rejected`: the other candidates, each with its reasons."""

    slot: str
    family: str
    spec: BackendSpec
    reason: str
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def provider(self) -> str:
        """The distribution of a backend that the platform's own does not have, with its version; else ""."""
        return self.spec.provider if isinstance(self.spec, ProvidedBackend) else ""

    @property
    def shown(self) -> str:
        """The name of the backend, and whose it is if it is not the platform's."""
        return f"{self.spec.name} of {self.provider}" if self.provider else self.spec.name

    def __str__(self) -> str:
        lines = [f"{self.slot} = {self.shown} because {self.reason}"]
        lines += [f"    not {name}: {'; '.join(reasons)}" for name, reasons in self.rejected]
        return "\n".join(lines)


@dataclass(frozen=True)
class Resolved:
    """A frozen configuration, and the provenance of every value in it.

    `backends` is keyed by slot, the name of the argument that selects the backend ("sampling_backend").
    `quantities` are core's named sums. `device` and `platform` are None if no platform was given. `refusals`:
    rejections of values that only `srv plan` resolves.
    """

    config: Config
    provenance: Mapping[str, Provenance]
    backends: Mapping[str, BackendChoice] = field(default_factory=dict)
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    capabilities: frozenset[str] = frozenset()
    platform: str | None = None
    device: DeviceFacts | None = None
    refusals: tuple[Rejection, ...] = ()

    def describe(self) -> dict[str, Any]:
        """The provenance of all arguments as JSON values, for /get_server_info and `--json`; secrets are hidden."""
        return {name: provenance.to_dict() for name, provenance in self.provenance.items()}


def amount_text(amount: float, unit: str) -> str:
    """A number with its unit; bytes are shown in the largest binary unit in which the number is at least 1."""
    if unit != "bytes":
        return f"{amount:g} {unit}".strip()
    for name, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(amount) >= size:
            return f"{amount / size:.2f} {name}"
    return f"{amount:.0f} bytes"
