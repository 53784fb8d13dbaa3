"""The cells of the support matrix. Plain values: this module calls no platform and reads no file.

A cell combines two facts, what its platform declares and what core implements, and shows the lower one, with the level
of the strongest evidence. A cell is never shown as verified unless it was run.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["arg", "value", "pair", "op", "model", "endpoint"]
Key = tuple[str, str, str]  # feature, platform, variant
CHANGED = "+changes"  # suffix of the commit in evidence if the tree had uncommitted changes


class Status(enum.Enum):
    """How well a feature is supported, best first. UNKNOWN: nothing is declared."""

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
    """The lower of two statuses. `planned` is below `unknown`: a feature that is not implemented stays planned."""
    return min(one, other, key=_RANK.__getitem__)


class Level(enum.IntEnum):
    """The strength of the evidence for a cell. Only E4 and E5 count as verified."""

    E0 = 0
    E1 = 1
    E2 = 2
    E3 = 3
    E4 = 4
    E5 = 5

    @property
    def word(self) -> str:
        """The name of the level in a cell."""
        return _LEVEL_WORDS[self]

    @property
    def verified(self) -> bool:
        return self >= Level.E4


SIMULATED = "simulated"
COMPILED = "compiled"  # also the note of evidence that kernels compile, although nothing ran
STARTS = "starts"  # also the note of evidence that a server starts with a value, although no test sees what it changes
LEVEL_3_WORDS = (COMPILED, STARTS, SIMULATED)  # the weakest first
_LEVEL_WORDS = {
    Level.E0: "published",
    Level.E1: "declared",
    Level.E2: "contract-tested",
    Level.E3: f"{SIMULATED}, {STARTS} or {COMPILED}",
    Level.E4: "verified",
    Level.E5: "verified, fast",
}

LEVELS = {
    Level.E0: "the vendor's page says so",
    Level.E1: "a plugin declares it",
    Level.E2: "a contract test passed without the device",
    Level.E3: "it ran on a simulated device, its kernels compiled for the target, or a server starts and serves with it"
    " and no test sees what it changes",
    Level.E4: "it ran on this variant",
    Level.E5: "it ran on this variant, and met its performance floor",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One test that was run. `covers`: the features of its cells ("schedule_policy=lpm"). `commit`: the tested one.

    `versions`: of torch, the vendor's packages and whatever else the probe reports, by name; empty if unknown.
    `simulator`: the distribution that imitated the device, with its version; empty on a real one.
    `variant` is the variant that it is evidence for, `machine` the one that the probe found: they differ if the test
    forced the code path of an older variant on a newer machine. `note`: a limitation, such as "forced path".
    `outcome`: "passed", "failed", or in a run for comparison "skipped", with the `reason`.
    """

    covers: tuple[str, ...]
    platform: str
    variant: str
    level: Level
    test: str
    outcome: str
    commit: str
    plugin_version: str
    versions: Mapping[str, str]
    device: str
    date: str
    machine: str
    note: str = ""
    reason: str = ""
    simulator: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    @property
    def skipped(self) -> bool:
        return self.outcome == "skipped"

    @property
    def forced(self) -> bool:
        """Whether the code path of this variant was forced on a machine of another variant."""
        return self.machine != self.variant


@dataclass(frozen=True, slots=True)
class Record:
    """One cell. `feature`: an argument's name, "name=value" for one of its values, or "kind:name" for anything else.

    `declared` is the status that the platform declares, `core` that of core. `reason_code` and `reason` say why the
    status is below supported. `base` is the level without any test: E1 if the platform's package declares the cell, E0
    if only the vendor's page does. `default`: whether the value is the declared default. `values`: of an argument whose
    level follows from that of its values alone, these.
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
    values: tuple[Record, ...] = ()

    @property
    def key(self) -> Key:
        return self.feature, self.platform, self.variant

    @property
    def argument(self) -> str:
        return self.feature.partition("=")[0]

    @property
    def status(self) -> Status:
        """The status that the cell shows: the lower of its two facts."""
        return lower(self.declared, self.core)

    @property
    def level(self) -> Level | None:
        """The highest level of evidence for the cell; None if there is none."""
        ran = [roll_up(self.values)] if self.values else [line.level for line in self.evidence if line.passed]
        return max((level for level in (self.base, *ran) if level is not None), default=None)

    @property
    def verified(self) -> bool:
        return self.status.works and self.level is not None and self.level.verified

    @property
    def ran(self) -> tuple[Evidence, ...]:
        """The tests on which the cell's level is based, if there are any."""
        return () if self.values else tuple(line for line in self.evidence if line.passed and line.level is self.level)

    @property
    def weakest(self) -> tuple[Record, ...]:
        """The values on which the cell's level is based, if it follows from those."""
        return tuple(value for value in self.values if value.status.works and value.level is self.level)

    @property
    def note(self) -> str:
        """The limitations of that evidence; empty if some of it has none."""
        notes = [line.note for line in self.ran]
        return ", ".join(dict.fromkeys(notes)) if all(notes) else ""

    @property
    def word(self) -> str:
        """The name of its level, "" without one; for level E3, the strongest of `LEVEL_3_WORDS` that tests show."""
        if self.level is not Level.E3:
            return self.level.word if self.level is not None else ""
        if self.values:
            return min((value.word for value in self.weakest), key=LEVEL_3_WORDS.index)
        words = {line.note if line.note in (COMPILED, STARTS) else SIMULATED for line in self.ran}
        return max(words, key=LEVEL_3_WORDS.index)

    @property
    def forced(self) -> bool:
        """Whether all of that evidence is of a forced code path; of an argument, that of one of its weakest values."""
        if self.values:
            return any(value.forced for value in self.weakest)
        return bool(self.ran) and all(line.forced for line in self.ran)

    @property
    def failed(self) -> tuple[Evidence, ...]:
        return tuple(line for line in self.evidence if line.outcome == "failed")


def split_versions(versions: Mapping[str, str], plugin: str, *, simulated: bool) -> tuple[dict[str, str], str]:
    """The `versions` and `simulator` of evidence, from the versions that a probe reports.

    A simulator is a distribution `NAME-simulator`, by convention, or else the platform's own, `plugin`.
    """
    simulators = [name for name in versions if name.endswith("-simulator")]
    others = {name: version for name, version in sorted(versions.items()) if name not in simulators}
    simulator_text = ", ".join(f"{name} {versions[name]}" for name in simulators)
    return others, (simulator_text or plugin) if simulated else ""


def roll_up(values: Sequence[Record]) -> Level | None:
    """The level of an argument: the lowest level of its working values; None if one of them has none."""
    levels = [record.level for record in values if record.status.works]
    if not levels or any(level is None for level in levels):
        return None
    return min(level for level in levels if level is not None)


def by_key(records: Iterable[Record]) -> dict[Key, Record]:
    """Records by cell; ValueError if two have the same cell."""
    records_by_key: dict[Key, Record] = {}
    for record in records:
        if record.key in records_by_key:
            raise ValueError(f"there are two records for the cell {' '.join(record.key)}")
        records_by_key[record.key] = record
    return records_by_key
