"""Running checks: each level in a child process, each check with a time limit; whatever happens is an outcome.

    run ──► first child: what is there?  ──► L0 ──► a child a level: check by check ──► Report
                                              a child that crashed or hung is ended, a new one goes on with the next

The parent imports neither torch nor the plugin, so that no plugin can harm the report.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

import srv
from srv.platform.choose import parse_device
from srv.platform.manifest import AUTOLOAD
from srv.testing.conformance.catalogue import CHECKS
from srv.testing.conformance.model import FACTS, Check, Level, Outcome, Report, builds_on, from_json, select

FACTS_SECONDS = 60.0
_EXIT_GRACE_S = 1.0
_STDERR_KEPT = 4096


class ChildFailed(Exception):
    """The child gave no answer: it crashed or hung. Says how, as a clause."""


class Child:
    """One child process. `ask` raises ChildFailed, and the child has ended then."""

    def __init__(self, device: str, scratch: str, environment: Mapping[str, str]) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._read_end, write_end = os.pipe()
        self._heard = bytearray()
        try:
            # -P: the folder that the run was started in is no place to import from.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "srv.testing.conformance.child", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=(write_end,),
                start_new_session=True,
                env={**os.environ, AUTOLOAD: "0", "TMPDIR": scratch, **environment},
            )
        finally:
            os.close(write_end)
        path = [os.path.abspath(entry) for entry in sys.path]
        self._say(json.dumps({"device": device, "scratch": scratch, "path": path}))

    def ask(self, word: str, seconds: float) -> dict[str, Any]:
        """The answer to one word. ChildFailed if none comes within `seconds`."""
        self._say(word)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._heard:
            if not self._listen(deadline):
                self.close()
                raise ChildFailed(f"did not end within {seconds:g} s, so its process was ended")
        line, _, rest = bytes(self._heard).partition(b"\n")
        self._heard[:] = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _listen(self, deadline: float) -> bool:
        """Read what there is; False once time is up. ChildFailed if the child has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_end, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return False
        chunk = os.read(self._read_end, 1 << 16)
        if not chunk:
            ending = self._ending()
            self.close()
            raise ChildFailed(ending)
        self._heard.extend(chunk)
        return True

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a child that has died is noticed where its answer is awaited
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _ending(self) -> str:
        """How the process ended, and the last thing it said."""
        try:
            status = self._process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed the pipe to the kit"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_KEPT))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        how = (
            f"crashed its process with {signal.Signals(-status).name}"
            if status < 0
            else f"ended its process ({status})"
        )
        return f"{how}; last words: {lines[-1].strip()}" if lines else how

    def close(self) -> None:
        """End the child and whatever it started; its group bears its id, which lives on while any member does."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        if not self._stderr.closed:
            self._stderr.close()
            os.close(self._read_end)


@dataclass
class Session:
    """A run on its way; checks come in the order of their levels.

    `scratch`: a folder for what checks write. `facts`: what a child found, asked for after the static checks.
    """

    device: str
    scratch: str
    facts: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    done: dict[str, Check] = field(default_factory=dict)
    observe: Callable[[Outcome], None] | None = None
    _child: Child | None = None
    _crashed: bool = False
    _level: Level = Level.L0

    def perform(self, check: Check) -> Outcome:
        """Run one check, or say why it is not run."""
        if check.level is not self._level:
            self._begin(check.level)
        reason = self._against(check)
        outcome = Outcome(check.name, check.level, "skipped", reason) if reason else self._ask(check)
        self.outcomes.append(outcome)
        self.done[check.name] = check
        if self.observe is not None:
            self.observe(outcome)
        return outcome

    def _against(self, check: Check) -> str:
        for outcome in self.outcomes:
            if outcome.status == "failed" and builds_on(check, self.done[outcome.check]):
                return f"{outcome.check} failed, and what builds on it would only repeat that"
        if check.level is Level.L0:
            return ""
        if self.facts.get("unavailable"):
            return f"there is no such device here: {self.facts['unavailable']}"
        if check.needs and check.needs not in self.facts.get("capabilities", ()):
            return f"the plugin does not declare the capability {check.needs}"
        return ""

    def _ask(self, check: Check) -> Outcome:
        started = time.monotonic()
        if check.fresh:
            self.end_child()
        try:
            return from_json(self._child_now().ask(check.name, check.seconds))
        except ChildFailed as failure:
            self._child, self._crashed = None, True
            seconds = round(time.monotonic() - started, 3)
            return Outcome(check.name, check.level, "failed", f"it {failure}", check.remedy, seconds)

    def _begin(self, level: Level) -> None:
        """A level gets a child of its own, with what the plugin's workers want in their environment."""
        if not self.facts:
            self.facts = self._survey()
        self.end_child()
        self._level = level

    def _survey(self) -> dict[str, Any]:
        """What is there. Where even asking fails, the plugin cannot be used and nothing is known of it."""
        if self._crashed:  # it would crash or hang again
            return {"platform": self.device, "unavailable": "looking at the plugin ended the process that did"}
        try:
            return self._child_now().ask(FACTS, FACTS_SECONDS)
        except ChildFailed as failure:
            self._child = None
            return {"platform": self.device, "unavailable": f"finding the plugin {failure}"}

    def _child_now(self) -> Child:
        if self._child is None:
            self._child = Child(self.device, self.scratch, self.facts.get("environment", {}))
        return self._child

    def end_child(self) -> None:
        """What comes next gets a new one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def report(self, level: Level, only: Sequence[str] = ()) -> Report:
        """All outcomes so far, with what is needed to judge and repeat them."""
        if not self.facts:
            self.facts = self._survey()
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
        return Report(level, tuple(self.outcomes), versions, device, date, command(self.device, level, only))


def command(device: str, level: Level, only: Sequence[str] = ()) -> str:
    """What a shell is told to repeat a run: the variables that srv and its plugins read, and the words."""
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in sorted(os.environ) if name.startswith("SRV_")]
    words = ["srv", "conformance", "run", "--device", device, "--level", level.name]
    return " ".join([*settings, shlex.join([*words, "--only", *only] if only else words)])


@contextmanager
def session(device: str, observe: Callable[[Outcome], None] | None = None) -> Iterator[Session]:
    """A run whose child never outlives it. Refusal if `device` cannot be read."""
    parse_device(device)
    with tempfile.TemporaryDirectory(prefix="srv-conformance-") as scratch:
        made = Session(device, scratch, observe=observe)
        try:
            yield made
        finally:
            made.end_child()


def run(
    device: str, level: Level, *, only: Sequence[str] = (), observe: Callable[[Outcome], None] | None = None
) -> Report:
    """Check a plugin up to a level.

    device: "NAME", or "NAME:VARIANT" if it must be of that variant. only: names of checks, or of groups ("pool"); all
    if empty. observe: called with each outcome as it comes. Never raises for what the plugin does; ValueError for an
    unknown check, Refusal for a `device` that cannot be read.
    """
    return run_checks(device, level, select(CHECKS, level, only), only, observe)


def run_checks(
    device: str,
    level: Level,
    checks: Sequence[Check],
    only: Sequence[str] = (),
    observe: Callable[[Outcome], None] | None = None,
) -> Report:
    """The same for a given set of checks, which must be in the order of their levels."""
    with session(device, observe) as running:
        for check in checks:
            running.perform(check)
        return running.report(level, only)
