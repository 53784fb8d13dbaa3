"""Levels, checks, outcomes, and the report that contains them. Data only; imports no torch."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FACTS = "?"  # the request to a child process for the plugin's facts; every other request is a check's name
Status = Literal["passed", "failed", "skipped", "undeclared"]


class Level(enum.IntEnum):
    """The depth of a run. Each level includes those below it."""

    L0 = 0  # static: the manifest and the probe; needs no device
    L1 = 1  # rules that hold on any device: platform, KV pool, sampler
    L2 = 2  # ops, attention and captured steps, compared with a reference in higher precision
    L3 = 3  # the real engine with a small model, each feature on and off
    L4 = 4  # arguments: declared and accepted values on a real server


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the kit.

    name: a stable dotted name. summary: what is true if it passes, in one line. target: "module:function" in this
    package; the function takes a `Kit`, returns its findings (one line), and raises `Fault`, `NotApplicable` or
    `Undeclared`. remedy: what the plugin's author should do if it fails, unless the fault has its own. needs: a
    capability that must be declared. after: checks, or groups of checks ("pool"), that this one depends on: if one of
    them failed, it is skipped, or runs and names it as a possible cause. blocks: whether checks of the same level are
    skipped if this one, on which they depend, failed: what they find would mean nothing. seconds: its time limit.
    fresh: it needs a process in which no platform was started.
    """

    name: str
    level: Level
    summary: str
    target: str
    remedy: str
    needs: str = ""
    after: tuple[str, ...] = ()
    blocks: bool = True
    seconds: float = 60.0
    fresh: bool = False

    @property
    def group(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check. `message` and `remedy` are sentences; a check that passed has no remedy.

    "undeclared": the feature works, but the plugin does not declare it. seconds: how long the check took.
    """

    check: str
    level: Level
    status: Status
    message: str
    remedy: str = ""
    seconds: float = 0.0


class Fault(Exception):
    """Raised by a check: the plugin violates it. Without a remedy, that of the check is reported."""

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message, self.remedy = message, remedy
        super().__init__(message)


class NotApplicable(Exception):
    """Raised by a check: the plugin does not declare the feature, or it cannot be checked on this machine."""


class Undeclared(Exception):
    """Raised by a check: a feature works that the plugin does not declare."""

    def __init__(self, message: str, remedy: str) -> None:
        self.message, self.remedy = message, remedy
        super().__init__(message)


@dataclass(frozen=True)
class Report:
    """All outcomes of a run, and what is needed to assess and repeat it.

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
        """Whether no check failed. Skipped checks do not count."""
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
        """Write JSON lines: first the run ("kind": "run"), then one line per outcome ("kind": "outcome")."""
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
    """Read what `Report.write` wrote. Raises ValueError if the file is no report."""
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
    """An outcome as a JSON object."""
    return {**asdict(outcome), "level": outcome.level.name}


def from_json(line: Mapping[str, Any]) -> Outcome:
    """The inverse of `to_json`; additional keys are ignored."""
    return Outcome(
        line["check"], Level[line["level"]], line["status"], line["message"], line["remedy"], float(line["seconds"])
    )


def select(checks: Iterable[Check], level: Level, only: Iterable[str] = ()) -> tuple[Check, ...]:
    """The checks up to a level; with `only`, those with these names or groups. ValueError for an unknown one."""
    all_checks, selected = tuple(checks), tuple(only)
    unknown = [name for name in selected if not any(_matches(check, name) for check in all_checks)]
    if unknown:
        raise ValueError(f"there is no check {', '.join(unknown)}; `srv conformance list` shows them")
    within = (check for check in all_checks if check.level <= level)
    return tuple(check for check in within if not selected or any(_matches(check, name) for name in selected))


def is_blocked(check: Check, failed: Check) -> bool:
    """Whether `check` is skipped because `failed` failed."""
    return builds_on(check, failed) and (failed.blocks or check.level is not failed.level)


def builds_on(check: Check, other: Check) -> bool:
    """Whether `check` depends on `other`: if both fail, that may be due to one fault."""
    if other.level is Level.L0 or check.level >= Level.L3:
        return other.level < check.level or any(_matches(other, name) for name in check.after)
    return any(_matches(other, name) for name in check.after)


def _matches(check: Check, name: str) -> bool:
    return name in (check.name, check.group)
