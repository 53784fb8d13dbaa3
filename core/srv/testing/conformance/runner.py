"""Runs checks: each level in a child process, each check with a time limit; a crash or a timeout is an outcome too.

    run ──► L0 ──► facts about plugin and device ──► L1, L2, ...: one child per level, one check at a time ──► Report
                                                     after a crash or timeout a new child continues with the next check

Children above L0 are forks of a process that has imported torch and the modules of the checks (`template`).
The parent imports neither torch nor the plugin, so that a plugin cannot damage the report.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import srv
from srv.args.sources import is_secret
from srv.platform.choose import parse_device
from srv.testing.conformance.catalogue import CHECKS
from srv.testing.conformance.model import (
    FACTS,
    Check,
    Level,
    Outcome,
    Report,
    builds_on,
    from_json,
    is_blocked,
    select,
)
from srv.testing.conformance.processes import Child, ChildFailed, ModuleStart, Template, child_environment, spawn

FACTS_SECONDS = 60.0
MAY_BE_THE_CAUSE = "which may be the cause"
# Beside the checks' own modules: torch, and the contracts of ops, which core does not import.
_HEAVY = ("torch", "srv_kernels.contracts")


class Interrupted(KeyboardInterrupt):
    """A run was interrupted; `report` has the outcomes until then."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(f"after {len(report.outcomes)} checks")


Starts = Callable[[Level, Mapping[str, str]], ModuleStart]  # for a level and the environment of the plugin's workers


@dataclass
class Session:
    """A run in progress; checks are performed in the order of their levels.

    scratch: a folder for files of the checks. facts: a child's answer to FACTS, requested after the static checks.
    starts: how children are started, if not as `_start` does.
    """

    device: str
    scratch: str
    facts: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    performed: dict[str, Check] = field(default_factory=dict)
    observe: Callable[[Outcome], None] | None = None
    starts: Starts | None = None
    _child: Child | None = None
    _crashed: bool = False
    _level: Level = Level.L0
    _template: Template | None = None

    def perform(self, check: Check) -> Outcome:
        """Run one check, or skip it with a reason."""
        if check.level is not self._level:
            self._start_level(check.level)
        reason = self._skip_reason(check)
        outcome = Outcome(check.name, check.level, "skipped", reason) if reason else self._run(check)
        self.outcomes.append(outcome)
        self.performed[check.name] = check
        if self.observe is not None:
            self.observe(outcome)
        return outcome

    def _skip_reason(self, check: Check) -> str:
        for outcome in self.outcomes:
            if outcome.status == "failed" and is_blocked(check, self.performed[outcome.check]):
                return f"{outcome.check} failed, and this check depends on it"
        if check.level is Level.L0:
            return ""
        if self.facts.get("unavailable"):
            return f"the device is not available: {self.facts['unavailable']}"
        if check.needs and check.needs not in self.facts.get("capabilities", ()):
            return f"the plugin does not declare the capability {check.needs}"
        return ""

    def _run(self, check: Check) -> Outcome:
        """Run one check. If it fails, the message begins with the failures that may have the same cause."""
        outcome = self._run_in_child(check)
        failed = [earlier.check for earlier in self.outcomes if earlier.status == "failed"]
        causes = [name for name in failed if builds_on(check, self.performed[name])]
        if outcome.status != "failed" or not causes:
            return outcome
        return replace(outcome, message=f"{', '.join(causes)} failed, {MAY_BE_THE_CAUSE}: {outcome.message}")

    def _run_in_child(self, check: Check) -> Outcome:
        started = time.monotonic()
        if check.fresh:
            self.end_child()
        try:
            return from_json(self._current_child().ask(check.name, check.seconds))
        except ChildFailed as failure:
            self._child, self._crashed = None, True
            seconds = round(time.monotonic() - started, 3)
            return Outcome(check.name, check.level, "failed", f"it {failure}", check.remedy, seconds)

    def _start_level(self, level: Level) -> None:
        """Each level has its own child, with the environment of the plugin's workers."""
        if not self.facts:
            self.facts = self._query_facts()
        self.end_child()
        self._level = level

    def _query_facts(self) -> dict[str, Any]:
        """Facts about the plugin and its device. If the request fails, the plugin is unusable and nothing is known."""
        if self._crashed:  # it would crash or hang again
            return {"platform": self.device, "unavailable": "examining the plugin crashed or blocked the process"}
        try:
            return self._current_child().ask(FACTS, FACTS_SECONDS)
        except ChildFailed as failure:
            self._child = None
            return {"platform": self.device, "unavailable": f"finding the plugin {failure}"}

    def _current_child(self) -> Child:
        if self._child is None:
            environment = self.facts.get("environment", {})
            start = (self.starts or self._start)(self._level, environment)
            self._child = Child(self.device, self.scratch, environment, start=start)
        return self._child

    def _start(self, level: Level, environment: Mapping[str, str]) -> ModuleStart:
        """Static checks need an interpreter without torch. Other children are forks of one that has imported it, with
        the environment of the plugin's workers."""
        if level is Level.L0:
            return spawn
        if self._template is None:
            self._template = Template(modules_of_checks(), child_environment(self.scratch, environment))
        return self._template.fork

    def end_child(self) -> None:
        """Terminate the child; the next check starts a new one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def end(self) -> None:
        """Terminate all processes of the run."""
        self.end_child()
        if self._template is not None:
            self._template.close()
            self._template = None

    def report(self, level: Level, only: Sequence[str] = ()) -> Report:
        """All outcomes so far, with what is needed to assess and repeat them."""
        if not self.facts:
            self.facts = self._query_facts()
        facts = self.facts
        versions = {"srv": srv.__version__}
        if facts.get("distribution"):
            versions[facts["distribution"]] = facts["version"]
        with suppress(importlib.metadata.PackageNotFoundError):
            versions["torch"] = importlib.metadata.version("torch")
        device = {
            "platform": facts.get("platform", self.device),
            **facts.get("device", {}),
            "simulated": bool(facts.get("simulated")),
            "available": not facts.get("unavailable"),
            "unavailable": facts.get("unavailable", ""),
            "capabilities": facts.get("capabilities", []),
        }
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Report(level, tuple(self.outcomes), versions, device, date, command_line(self.device, level, only))


def modules_of_checks() -> list[str]:
    """What the checks above L0 import, without the plugin."""
    modules = dict.fromkeys(check.target.partition(":")[0] for check in CHECKS if check.level is not Level.L0)
    return [*_HEAVY, "srv.testing.conformance.child", *(f"srv.testing.conformance.{module}" for module in modules)]


def command_line(device: str, level: Level, only: Sequence[str] = ()) -> str:
    """The shell command that repeats a run, with the variables that srv and its plugins read; secrets are left out."""
    names = [name for name in sorted(os.environ) if name.startswith("SRV_") and not is_secret(name)]
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in names]
    arguments = ["srv", "conformance", "run", "--device", device, "--level", level.name]
    return " ".join([*settings, shlex.join([*arguments, "--only", *only] if only else arguments)])


@contextmanager
def session(
    device: str, observe: Callable[[Outcome], None] | None = None, starts: Starts | None = None
) -> Iterator[Session]:
    """A run whose child never outlives it. Raises Refusal if `device` cannot be parsed."""
    parse_device(device)
    with tempfile.TemporaryDirectory(prefix="srv-conformance-") as scratch:
        current = Session(device, scratch, observe=observe, starts=starts)
        try:
            yield current
        finally:
            current.end()


def run(
    device: str,
    level: Level,
    *,
    only: Sequence[str] = (),
    observe: Callable[[Outcome], None] | None = None,
    starts: Starts | None = None,
) -> Report:
    """Check a plugin up to a level.

    device: "NAME", or "NAME:VARIANT" to require a variant. only: names of checks, or of groups ("pool"); all if empty.
    observe: called with each outcome. starts: as in `Session`. Errors of the plugin become outcomes. Raises ValueError
    for an unknown check, Refusal for a `device` that cannot be parsed, and Interrupted for a KeyboardInterrupt.
    """
    return run_checks(device, level, select(CHECKS, level, only), only, observe, starts)


def run_checks(
    device: str,
    level: Level,
    checks: Sequence[Check],
    only: Sequence[str] = (),
    observe: Callable[[Outcome], None] | None = None,
    starts: Starts | None = None,
) -> Report:
    """Like `run`, for the given checks, which must be in the order of their levels."""
    with session(device, observe, starts) as current:
        try:
            for check in checks:
                current.perform(check)
        except KeyboardInterrupt as error:
            current.end_child()  # it performs a check
            raise Interrupted(current.report(level, only)) from error
        return current.report(level, only)
