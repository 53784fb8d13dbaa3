"""What is said about an argument, by whom and why; and what a value's story is, once resolution has decided.

Plain values. Nothing here knows how statements are gathered or which of them wins.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from srv.args.config import ARGUMENTS, Config
from srv.errors import Rejected

if TYPE_CHECKING:
    from srv.platform.facts import BackendSpec, DeviceFacts


class Layer(enum.IntEnum):
    """Whose word counts: the higher wins."""

    GENERIC = 0
    MODEL = 1
    PLATFORM = 2
    BACKEND = 3
    USER = 4


class Origin(enum.IntEnum):
    """Where a user said it: the higher wins within the layer USER."""

    CONFIG_FILE = 0
    ENVIRONMENT = 1
    COMMAND_LINE = 2


class UserStatement(NamedTuple):
    """One value that the user gave, of the argument's type.

    `source`: "config file a.yaml line 3". `name`: the name that he used, if it is not the argument's own.
    `argument` may be a deprecated switch until `srv.args.deprecated` has translated it.
    """

    argument: str
    value: Any
    origin: Origin
    source: str
    name: str = ""


class UserInput(NamedTuple):
    """Everything the user said: readable statements, refusals of the rest, and notes worth a warning."""

    statements: tuple[UserStatement, ...] = ()
    rejections: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()

    def value(self, argument: str) -> Any:
        """The user's word on an argument, or None: needed for those that say which facts to read (model_path)."""
        best = max((s for s in self.statements if s.argument == argument), key=lambda s: s.origin, default=None)
        return best.value if best else None


class Statement(NamedTuple):
    """A value for an argument, with its layer, its owner and the clause after "because".

    `reads`: the arguments and quantities that it was computed from.
    """

    argument: str
    value: Any
    layer: Layer
    owner: str
    reason: str
    origin: Origin = Origin.COMMAND_LINE
    reads: tuple[str, ...] = ()


class Story(NamedTuple):
    """Why an argument has its value. `shadowed` are the statements that were outranked, strongest first."""

    argument: str
    value: Any
    owner: str
    layer: Layer
    reason: str
    shadowed: tuple[Statement, ...] = ()

    def __str__(self) -> str:
        show = ARGUMENTS[self.argument].show
        lines = [f"{self.argument} = {show(self.value)} because {self.reason}"]
        lines += [f"    shadowed: {show(said.value)} because {said.reason}" for said in self.shadowed]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The story as JSON can hold it; a secret value is hidden."""
        return {
            "value": _printable(self.argument, self.value),
            "layer": self.layer.name.lower(),
            "owner": self.owner,
            "because": self.reason,
            "shadowed": [
                {
                    "value": _printable(said.argument, said.value),
                    "layer": said.layer.name.lower(),
                    "owner": said.owner,
                    "because": said.reason,
                }
                for said in self.shadowed
            ],
        }


def _printable(name: str, value: Any) -> Any:
    argument = ARGUMENTS[name]
    return argument.show(value) if argument.arg.secret and value is not None else argument.kind.dump(value)


class Part(NamedTuple):
    """One contribution to a quantity, as it came out."""

    name: str
    owner: str
    amount: float
    reason: str


class Quantity(NamedTuple):
    """A sum that several owners add to, part by part."""

    name: str
    unit: str
    parts: tuple[Part, ...] = ()

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
    """The backend chosen for one slot, why, and the reasons against each other candidate."""

    slot: str
    family: str
    spec: BackendSpec
    why: str
    against: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.slot} = {self.spec.name} because {self.why}"]
        lines += [f"    not {name}: {'; '.join(reasons)}" for name, reasons in self.against]
        return "\n".join(lines)


@dataclass(frozen=True)
class Resolved:
    """A frozen configuration, and the story of everything in it.

    `backends` is keyed by slot, the name of the argument that chooses it ("sampling_backend").
    `quantities` are core's named sums. `device` and `platform` are None without a platform.
    """

    config: Config
    stories: Mapping[str, Story]
    backends: Mapping[str, BackendChoice] = field(default_factory=dict)
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    capabilities: frozenset[str] = frozenset()
    platform: str | None = None
    device: DeviceFacts | None = None

    def describe(self) -> dict[str, Any]:
        """Stories by argument as JSON can hold them, secrets hidden: for /get_server_info and `--json`."""
        return {name: story.to_dict() for name, story in self.stories.items()}


def amount_text(amount: float, unit: str) -> str:
    """A number with its unit; bytes in the largest binary unit that leaves one digit before the point."""
    if unit != "bytes":
        return f"{amount:g} {unit}".strip()
    for name, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(amount) >= size:
            return f"{amount / size:.2f} {name}"
    return f"{amount:.0f} bytes"
