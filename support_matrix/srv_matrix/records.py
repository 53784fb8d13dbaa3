"""What a cell of the support matrix holds. Plain values: nothing here asks a platform or reads a file.

A cell holds two facts, what its platform declares and what core implements, and prints the lower. Beside it
stands the level of the strongest evidence. Nothing is ever shown greener than it was run.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["arg", "value", "pair", "op", "model", "endpoint"]
Key = tuple[str, str, str]  # feature, platform, variant
CHANGED = "+changes"  # ends the commit of evidence whose tree was not that commit's


class Status(enum.Enum):
    """How far a feature is supported, best first. UNKNOWN: nobody has said anything."""

    SUPPORTED = "supported"
    LIMITED = "limited"
    EXPERIMENTAL = "experimental"
    UNKNOWN = "unknown"
    PLANNED = "planned"
    UNSUPPORTED = "unsupported"
    NOT_APPLICABLE = "not_applicable"

    @property
    def works(self) -> bool:
        """Whether a user may set it."""
        return self in (Status.SUPPORTED, Status.LIMITED, Status.EXPERIMENTAL)


_RANK = {status: rank for rank, status in enumerate(reversed(Status))}


def lower(one: Status, other: Status) -> Status:
    """The less favourable of two facts. `planned` lies below `unknown`: silence makes no feature."""
    return min(one, other, key=_RANK.__getitem__)


class Level(enum.IntEnum):
    """How well a cell is known. Only E4 and E5 print as verified."""

    E0 = 0
    E1 = 1
    E2 = 2
    E3 = 3
    E4 = 4
    E5 = 5

    @property
    def word(self) -> str:
        """What a cell of this level says of itself."""
        return _WORDS[self]

    @property
    def verified(self) -> bool:
        return self >= Level.E4


_WORDS = {
    Level.E0: "published",
    Level.E1: "declared",
    Level.E2: "contract-tested",
    Level.E3: "simulated or compiled",
    Level.E4: "verified",
    Level.E5: "verified, fast",
}

LEVELS = {
    Level.E0: "the vendor's page says so",
    Level.E1: "a plugin declares it",
    Level.E2: "a contract test passed without the device",
    Level.E3: "it ran on a simulated device, or its kernels compiled for the target",
    Level.E4: "it ran on this variant",
    Level.E5: "it ran on this variant, and met its performance floor",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One test that has run. `covers`: cells by feature ("schedule_policy=lpm"). `commit`: the one tested.

    `variant` is the one that it speaks for, `machine` the one that the probe found: they differ where a newer machine
    was made to take an older one's code. `note` marks what weakens it, such as "forced path". `outcome`: "passed",
    "failed", or in a run for comparison "skipped", and `reason` says why.
    """

    covers: tuple[str, ...]
    platform: str
    variant: str
    level: Level
    test: str
    outcome: str
    commit: str
    plugin_version: str
    driver: str
    device: str
    date: str
    machine: str
    note: str = ""
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    @property
    def skipped(self) -> bool:
        return self.outcome == "skipped"

    @property
    def forced(self) -> bool:
        """Whether a machine of another variant was made to take this one's path."""
        return self.machine != self.variant


@dataclass(frozen=True, slots=True)
class Record:
    """One cell. `feature` is an argument's name, "name=value" of one value of it, or "kind:name" of anything else.

    `declared` is the platform's fact, `core` core's. `reason_code` and `reason` say why the status is below
    supported. `base` is the level without any test: E1 where the platform's package declares the cell, E0 where
    the vendor's page alone does. `default`: the value is the declared default. `rolled_up`: the lowest level of
    the values of an argument, and `by_values` says that it has such; then nothing but they can lift it.
    """

    feature: str
    kind: Kind
    platform: str
    variant: str
    declared: Status
    core: Status
    reason_code: str = ""
    reason: str = ""
    requires: str = ""
    since: str = ""
    declared_by: str = ""
    base: Level | None = None
    default: bool = False
    evidence: tuple[Evidence, ...] = ()
    rolled_up: Level | None = None
    by_values: bool = False

    @property
    def key(self) -> Key:
        return self.feature, self.platform, self.variant

    @property
    def argument(self) -> str:
        return self.feature.partition("=")[0]

    @property
    def status(self) -> Status:
        """What the cell prints: the lower of its two facts."""
        return lower(self.declared, self.core)

    @property
    def level(self) -> Level | None:
        """The strongest level that stands behind the cell; None: nothing does."""
        ran = [] if self.by_values else [each.level for each in self.evidence if each.passed]
        return max((level for level in (self.base, self.rolled_up, *ran) if level is not None), default=None)

    @property
    def verified(self) -> bool:
        return self.status.works and self.level is not None and self.level.verified

    @property
    def ran(self) -> tuple[Evidence, ...]:
        """The evidence that the cell's level rests on, if it is its own and no declaration."""
        return (
            () if self.by_values else tuple(each for each in self.evidence if each.passed and each.level is self.level)
        )

    @property
    def note(self) -> str:
        """What weakens that evidence; empty if some of it is whole."""
        notes = [each.note for each in self.ran]
        return ", ".join(dict.fromkeys(notes)) if all(notes) else ""

    @property
    def forced(self) -> bool:
        """Whether all of that evidence is of a forced path."""
        return bool(self.ran) and all(each.forced for each in self.ran)

    @property
    def failed(self) -> tuple[Evidence, ...]:
        return tuple(each for each in self.evidence if each.outcome == "failed")


def by_key(records: Iterable[Record]) -> dict[Key, Record]:
    """Records by their cell; ValueError if two claim one."""
    found: dict[Key, Record] = {}
    for record in records:
        if record.key in found:
            raise ValueError(f"two records of the cell {' '.join(record.key)}")
        found[record.key] = record
    return found
