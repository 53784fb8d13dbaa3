"""Runs checks: each level in a child process, each check with a time limit; a crash or a timeout is an outcome too.

    run ──► L0 ──► facts about plugin and device ──► L1, L2, ...: one child per level, one check at a time ──► Report
                                                     after a crash or timeout a new child continues with the next check

The parent imports neither torch nor the plugin, so that a plugin cannot damage the report.
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
from srv.args.sources import is_secret
from srv.platform.choose import parse_device
from srv.platform.manifest import AUTOLOAD
from srv.testing.conformance.catalogue import CHECKS
from srv.testing.conformance.model import FACTS, Check, Level, Outcome, Report, builds_on, from_json, select

FACTS_SECONDS = 60.0
_EXIT_GRACE_S = 1.0
_OUTPUT_KEPT_BYTES = 4096


class ChildFailed(Exception):
    """The child did not answer: it crashed or hung.

    The message is a predicate without a subject, such as "did not end within 60 s".
    """


class Child:
    """One child process. If `ask` or `answer` raises ChildFailed, the child has been terminated.

    module: what it runs, with `srv.testing.conformance.child.serve`. rank, ranks: as in `Kit`.
    """

    def __init__(
        self,
        device: str,
        scratch: str,
        environment: Mapping[str, str],
        module: str = "srv.testing.conformance.child",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._read_end, write_end = os.pipe()
        self._received = bytearray()
        try:
            # -P: nothing is imported from the current folder.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(write_end)],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(write_end,),
                start_new_session=True,
                env={**os.environ, AUTOLOAD: "0", "TMPDIR": scratch, **environment},
            )
        finally:
            os.close(write_end)
        path = [os.path.abspath(entry) for entry in sys.path]
        setting = {"device": device, "scratch": scratch, "path": path, "rank": rank, "ranks": ranks}
        self.send(json.dumps(setting))

    def ask(self, request: str, seconds: float) -> dict[str, Any]:
        """The answer to one request. Raises ChildFailed if there is none within `seconds`."""
        self.send(request)
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict[str, Any]:
        """The answer to the oldest request that was sent. Raises ChildFailed if there is none within `seconds`."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not self._receive(deadline):
                self.close()
                raise ChildFailed(f"did not end within {seconds:g} s, so its process was terminated")
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _receive(self, deadline: float) -> bool:
        """Read available output; False at the deadline. Raises ChildFailed if the child has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_end, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return False
        chunk = os.read(self._read_end, 1 << 16)
        if not chunk:
            description = self._describe_exit()
            self.close()
            raise ChildFailed(description)
        self._received.extend(chunk)
        return True

    def send(self, line: str) -> None:
        """Send one request without waiting for its answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_receive` reports a child that has ended
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _describe_exit(self) -> str:
        """How the process ended, and its last line of output."""
        try:
            status = self._process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed the pipe to the kit"
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - _OUTPUT_KEPT_BYTES))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        how = (
            f"crashed its process with {signal.Signals(-status).name}"
            if status < 0
            else f"ended its process with status {status}"
        )
        return f"{how}; last line: {lines[-1].strip()}" if lines else how

    def close(self) -> None:
        """Terminate the child and its children, which are in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        if not self._output.closed:
            self._output.close()
            os.close(self._read_end)


@dataclass
class Session:
    """A run in progress; checks are performed in the order of their levels.

    scratch: a folder for files of the checks. facts: a child's answer to FACTS, requested after the static checks.
    """

    device: str
    scratch: str
    facts: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    performed: dict[str, Check] = field(default_factory=dict)
    observe: Callable[[Outcome], None] | None = None
    _child: Child | None = None
    _crashed: bool = False
    _level: Level = Level.L0

    def perform(self, check: Check) -> Outcome:
        """Run one check, or skip it with a reason."""
        if check.level is not self._level:
            self._start_level(check.level)
        reason = self._skip_reason(check)
        outcome = Outcome(check.name, check.level, "skipped", reason) if reason else self._run_in_child(check)
        self.outcomes.append(outcome)
        self.performed[check.name] = check
        if self.observe is not None:
            self.observe(outcome)
        return outcome

    def _skip_reason(self, check: Check) -> str:
        for outcome in self.outcomes:
            if outcome.status == "failed" and builds_on(check, self.performed[outcome.check]):
                return f"{outcome.check} failed, and this check depends on it"
        if check.level is Level.L0:
            return ""
        if self.facts.get("unavailable"):
            return f"the device is not available: {self.facts['unavailable']}"
        if check.needs and check.needs not in self.facts.get("capabilities", ()):
            return f"the plugin does not declare the capability {check.needs}"
        return ""

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
            self._child = Child(self.device, self.scratch, self.facts.get("environment", {}))
        return self._child

    def end_child(self) -> None:
        """Terminate the child; the next check starts a new one."""
        if self._child is not None:
            self._child.close()
            self._child = None

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


def command_line(device: str, level: Level, only: Sequence[str] = ()) -> str:
    """The shell command that repeats a run, with the variables that srv and its plugins read; secrets are left out."""
    names = [name for name in sorted(os.environ) if name.startswith("SRV_") and not is_secret(name)]
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in names]
    arguments = ["srv", "conformance", "run", "--device", device, "--level", level.name]
    return " ".join([*settings, shlex.join([*arguments, "--only", *only] if only else arguments)])


@contextmanager
def session(device: str, observe: Callable[[Outcome], None] | None = None) -> Iterator[Session]:
    """A run whose child never outlives it. Raises Refusal if `device` cannot be parsed."""
    parse_device(device)
    with tempfile.TemporaryDirectory(prefix="srv-conformance-") as scratch:
        current = Session(device, scratch, observe=observe)
        try:
            yield current
        finally:
            current.end_child()


def run(
    device: str, level: Level, *, only: Sequence[str] = (), observe: Callable[[Outcome], None] | None = None
) -> Report:
    """Check a plugin up to a level.

    device: "NAME", or "NAME:VARIANT" to require a variant. only: names of checks, or of groups ("pool"); all if empty.
    observe: called with each outcome. Errors of the plugin become outcomes. Raises ValueError for an unknown check, and
    Refusal for a `device` that cannot be parsed.
    """
    return run_checks(device, level, select(CHECKS, level, only), only, observe)


def run_checks(
    device: str,
    level: Level,
    checks: Sequence[Check],
    only: Sequence[str] = (),
    observe: Callable[[Outcome], None] | None = None,
) -> Report:
    """Like `run`, for the given checks, which must be in the order of their levels."""
    with session(device, observe) as current:
        for check in checks:
            current.perform(check)
        return current.report(level, only)
