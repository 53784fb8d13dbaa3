"""The three tiers of tests, slices of the third, and what is left of it.

`slow` puts a test into `make test-all`, `proof` into `make proof`; all others run in `make test`. So each test is in
exactly one tier, and nothing that was recorded earlier decides whether it runs.

A slice is a tenth of the proof, or another fraction of it: `--slice 3/10`, or `--slice commit/10`, which takes the
number from the hash of HEAD. Slices take about equally long: `@pytest.mark.proof(minutes=4)` says how long a test takes
on two cores. Tests of one `xdist_group`, which share an expensive fixture, are in the same slice.

`--left=FILE` makes the proof resumable: FILE has the tests that have not passed yet, and the next run takes only those.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

LEFT = "srv_left"  # the key under which workers of xdist get the tests that are left
PROOF, SLOW = "proof", "slow"
MINUTES = 0.2  # of a test of the proof that does not say how long it takes


def check_tiers(items: Iterable[pytest.Item]) -> None:
    """UsageError for a test that is in two tiers."""
    both = [item.nodeid for item in items if item.get_closest_marker(PROOF) and item.get_closest_marker(SLOW)]
    if both:
        raise pytest.UsageError(f"a test is in one tier, either {SLOW} or {PROOF}; in both are {', '.join(both[:5])}")


def minutes_of(item: pytest.Item) -> float:
    mark = item.get_closest_marker(PROOF)
    return float(mark.kwargs.get("minutes", MINUTES)) if mark is not None else MINUTES


def unit_of(item: pytest.Item) -> str:
    """What is in one slice as a whole: the test's group, if it has one, or else the test itself."""
    group = item.get_closest_marker("xdist_group")
    return str(group.args[0] if group.args else group.kwargs["name"]) if group is not None else item.nodeid


def slices(minutes: Mapping[str, float], count: int) -> list[set[str]]:
    """Divide units among `count` slices that take about equally long: the longest first, each into the shortest."""
    parts: list[set[str]] = [set() for _ in range(count)]
    sums = [0.0] * count
    for unit in sorted(minutes, key=lambda unit: (-minutes[unit], unit)):
        shortest = sums.index(min(sums))
        parts[shortest].add(unit)
        sums[shortest] += minutes[unit]
    return parts


@dataclass(frozen=True)
class Slice:
    """Slice `number` of `count`, from 0."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str, root: Path) -> Slice:
        """ "3/10" or "commit/10". UsageError for anything else, and where there is no commit."""
        number, _, count = text.partition("/")
        if not count.isdecimal() or int(count) < 1 or not (number == "commit" or number.isdecimal()):
            raise pytest.UsageError(f"--slice {text}: expected NUMBER/COUNT or commit/COUNT, such as 3/10 or commit/10")
        chosen = int(head(root), 16) % int(count) if number == "commit" else int(number)
        if chosen >= int(count):
            raise pytest.UsageError(f"--slice {text}: the slices are numbered 0 to {int(count) - 1}")
        return cls(chosen, int(count))

    def select(self, items: Iterable[pytest.Item]) -> set[str]:
        """The ids of the tests in this slice."""
        items = list(items)
        minutes: dict[str, float] = {}
        for item in items:
            minutes[unit_of(item)] = minutes.get(unit_of(item), 0.0) + minutes_of(item)
        units = slices(minutes, self.count)[self.number]
        return {item.nodeid for item in items if unit_of(item) in units}


def head(root: Path) -> str:
    """The hash of the commit that is checked out."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise pytest.UsageError(f"{root} has no commit, which `commit` needs: {done.stderr.strip()}")
    return done.stdout.strip()


def tree(root: Path) -> str:
    """The tree that is tested: a commit, with a mark if files differ from it."""
    command = ["git", "status", "--porcelain"]
    changed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    return head(root)[:12] + (" with changes" if changed.strip() else "")


@dataclass
class Left:
    """The tests of the proof that have not passed yet, and on which trees the others did."""

    left: list[str]
    passed_on: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Left | None:
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


class LeftRecorder:
    """Takes each test that passed out of the file, in the one process that sees all reports.

    A test that was skipped is left: it proved nothing. Workers of xdist get the tests that were left at the start.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._tree = path, tree(root)
        self._failed: set[str] = set()
        self._passed: set[str] = set()
        found = Left.read(path)
        self.selected = found.left if found is not None else None

    def _start(self, collected: Iterable[str]) -> None:
        if not self._path.exists():
            Left(sorted(collected)).write(self._path)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # none in a process whose workers collect
            self._start(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._start(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[LEFT] = self.selected

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._failed.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid in self._passed - self._failed:
            self._take_out(report.nodeid)

    def _take_out(self, test: str) -> None:
        left = Left.read(self._path)
        if left is not None and test in left.left:
            left.left.remove(test)
            left.passed_on[self._tree] = left.passed_on.get(self._tree, 0) + 1
            left.write(self._path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        left = Left.read(self._path)
        if left is None:
            return
        trees = ", ".join(f"{count} on {name}" for name, count in left.passed_on.items())
        terminalreporter.section("the proof")
        terminalreporter.write_line(f"{len(left.left)} tests are left in {self._path}; passed: {trees or 'none'}")
        if not left.left:
            terminalreporter.write_line(f"Nothing is left. Remove {self._path} to start again.")
