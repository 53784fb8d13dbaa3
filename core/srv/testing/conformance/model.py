"""What the kit says: levels, checks, outcomes, and the report that holds them. Data alone; imports no torch."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FACTS = "?"  # what the parent of a run says to a child to learn what is there; any other word is a check's name
Status = Literal["passed", "failed", "skipped", "undeclared"]


class Level(enum.IntEnum):
    """How deep a run looks. Each level contains those below it."""

    L0 = 0  # static: the manifest and the probe; needs no device
    L1 = 1  # laws that hold on any device: platform, KV pool, sampler
    L2 = 2  # ops, attention and captured steps against a reference in higher precision
    L3 = 3  # the real engine with a small model, each feature on and off
    L4 = 4  # arguments: what is declared, against a real server


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the kit looks at.

    name: stable dotted words. summary: one line of what holds if it passes. target: "module:function" within this
    package; the function takes a `Kit`, returns what it saw (one line), and raises `Fault`, `NotApplicable` or
    `Undeclared`. remedy: what its maker should do if it fails and the fault itself says nothing better. needs: a
    capability that must be declared. after: checks, or groups of them ("pool"), without which this one means
    nothing: where one of those failed, it is skipped. seconds: how long it may take. fresh: it wants a process in
    which the platform was never started.
    """

    name: str
    level: Level
    summary: str
    target: str
    remedy: str
    needs: str = ""
    after: tuple[str, ...] = ()
    seconds: float = 60.0
    fresh: bool = False

    @property
    def group(self) -> str:
        """The first word of the name."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check. `message` and `remedy` are sentences; a check that passed needs no remedy.

    "undeclared": it works, though the plugin does not declare it. `seconds` that it took.
    """

    check: str
    level: Level
    status: Status
    message: str
    remedy: str = ""
    seconds: float = 0.0


class Fault(Exception):
    """Raised by a check: the plugin breaks this law. Without a remedy, the check's own is given."""

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message, self.remedy = message, remedy
        super().__init__(message)


class NotApplicable(Exception):
    """Raised by a check: the plugin does not declare what it looks at, or it cannot be looked at here."""


class Undeclared(Exception):
    """Raised by a check: something works that the plugin does not declare."""

    def __init__(self, message: str, remedy: str) -> None:
        self.message, self.remedy = message, remedy
        super().__init__(message)


@dataclass(frozen=True)
class Report:
    """All outcomes of a run, and what is needed to judge and repeat it.

    versions: of srv, the plugin's distribution, torch, by name. device: facts of the probe ("platform", "variant",
    "name", "memory_bytes", "count", "simulated", "available", ...). date: UTC, ISO 8601. command: repeats the run.
    """

    level: Level
    outcomes: tuple[Outcome, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    date: str = ""
    command: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing failed. What was skipped is not counted against the plugin."""
        return not self.failures

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return self.of("failed")

    def of(self, status: Status) -> tuple[Outcome, ...]:
        """The outcomes of one status."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == status)

    def outcome(self, check: str) -> Outcome:
        """The outcome of one check. KeyError if it was not part of the run."""
        for outcome in self.outcomes:
            if outcome.check == check:
                return outcome
        raise KeyError(check)

    def write(self, path: str | Path) -> None:
        """JSON lines: first what was run where ("kind": "run"), then one line an outcome ("kind": "outcome")."""
        head = {
            "kind": "run",
            "level": self.level.name,
            "date": self.date,
            "command": self.command,
            "versions": dict(self.versions),
            "device": dict(self.device),
        }
        lines = [head, *({"kind": "outcome", **to_json(outcome)} for outcome in self.outcomes)]
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_report(path: str | Path) -> Report:
    """What `Report.write` wrote. ValueError if it is no report."""
    head, *rest = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if head.get("kind") != "run":
        raise ValueError(f"{path} is no conformance report: its first line is of kind {head.get('kind')!r}")
    return Report(
        level=Level[head["level"]],
        outcomes=tuple(from_json(line) for line in rest),
        versions=head["versions"],
        device=head["device"],
        date=head["date"],
        command=head["command"],
    )


def to_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON can hold it."""
    return {**asdict(outcome), "level": outcome.level.name}


def from_json(line: Mapping[str, Any]) -> Outcome:
    """What `to_json` gave; further keys are left out."""
    return Outcome(
        line["check"], Level[line["level"]], line["status"], line["message"], line["remedy"], float(line["seconds"])
    )


def select(checks: Iterable[Check], level: Level, only: Iterable[str] = ()) -> tuple[Check, ...]:
    """The checks up to a level; with `only`, those of these names or groups ("pool"). ValueError for an unknown one."""
    known, wanted = tuple(checks), tuple(only)
    unknown = [word for word in wanted if not any(_named(check, word) for check in known)]
    if unknown:
        raise ValueError(f"there is no check {', '.join(unknown)}; `srv conformance list` shows them")
    within = (check for check in known if check.level <= level)
    return tuple(check for check in within if not wanted or any(_named(check, word) for word in wanted))


def builds_on(check: Check, other: Check) -> bool:
    """Whether `check` means nothing where `other` failed."""
    if other.level is Level.L0 or check.level >= Level.L3:
        return other.level < check.level or any(_named(other, word) for word in check.after)
    return any(_named(other, word) for word in check.after)


def _named(check: Check, word: str) -> bool:
    return word in (check.name, check.group)
