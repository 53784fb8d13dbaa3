"""The three tiers of tests, slices of the third, and what is left of it.

`slow` puts a test into `make test-all`, `proof` into `make proof`; all others run in `make test`. So each test is in
exactly one tier, and nothing that was recorded earlier decides whether it runs. `--tier fast` selects those of a tier.

A slice is a tenth of the proof, or another fraction of it: `--slice 3/10`, or `--slice commit/10`, which takes the
number from the hash of HEAD. Slices take about equally long: `@pytest.mark.proof(minutes=4)` says how long a test takes
on two cores. Tests of one `xdist_group`, which share an expensive fixture, are in the same slice; files with such tests
run in one process each.

A run of the second or third tier imports only the test files that say its mark, or import a helper that does. That of
the first, which imports all, fails for a file that has the mark otherwise.

`--passed=FILE` makes the proof resumable: FILE has the tests that have passed, and the next run takes all others.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROOF, SLOW = "proof", "slow"
# By their names in `--tier`, as expressions of marks.
TIERS = {"fast": f"not {SLOW} and not {PROOF}", "slow": SLOW, "proof": PROOF}
# The keys under which workers of xdist get the tests that have passed, and say which ones they have collected.
PASSED, COLLECTED = "srv_passed", "srv_collected"
MINUTES = 0.2  # of a test of the proof that does not say how long it takes


def check_tiers(items: Iterable[pytest.Item]) -> None:
    """UsageError for a test that is in two tiers, and for one whose file does not show in which it is."""
    items = list(items)
    both = [item.nodeid for item in items if item.get_closest_marker(PROOF) and item.get_closest_marker(SLOW)]
    if both:
        raise pytest.UsageError(f"a test is in one tier, either {SLOW} or {PROOF}; in both are {', '.join(both[:5])}")
    for tier in (SLOW, PROOF):
        for path in sorted({item.path for item in items if item.get_closest_marker(tier)}):
            if not says_mark(path, tier):
                raise pytest.UsageError(f"{path} has tests with mark.{tier}: say so in it, not in what it imports")


def says_mark(path: Path, tier: str) -> bool:
    """Whether a test file, or a conftest.py of its folders, whose fixtures may have parameters with marks, says a mark
    or imports a helper of tests/helpers that does."""
    suite = Path(__file__).parents[1]  # whose own conftest.py has no fixtures with parameters
    fixtures = [folder / "conftest.py" for folder in path.parents if folder != suite and suite in folder.parents]
    texts = [fixture.read_text(encoding="utf-8") for fixture in (path, *fixtures) if fixture.exists()]
    ways = (f"mark.{tier}", *(f"from {helper} import" for helper in _helpers_that_say(tier)))
    return any(way in text for way in ways for text in texts)


@functools.cache
def _helpers_that_say(tier: str) -> tuple[str, ...]:
    paths = Path(__file__).parent.glob("*.py")
    return tuple(sorted(path.stem for path in paths if f"mark.{tier}" in path.read_text(encoding="utf-8")))


def minutes_of(item: pytest.Item) -> float:
    mark = item.get_closest_marker(PROOF)
    return float(mark.kwargs.get("minutes", MINUTES)) if mark is not None else MINUTES


def unit_of(item: pytest.Item) -> str:
    """What is in one slice as a whole: the test's group, if it has one, or else the test itself."""
    group = item.get_closest_marker("xdist_group")
    return str(group.args[0] if group.args else group.kwargs["name"]) if group is not None else item.nodeid


def unit_minutes(items: Iterable[pytest.Item]) -> dict[str, float]:
    """How long each unit takes."""
    minutes: dict[str, float] = {}
    for item in items:
        minutes[unit_of(item)] = minutes.get(unit_of(item), 0.0) + minutes_of(item)
    return minutes


def longest_first(items: list[pytest.Item]) -> None:
    """Order the tests of the proof, so that no long one runs alone at the end."""
    minutes = unit_minutes(items)
    items.sort(key=lambda item: -minutes[unit_of(item)])


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
        units = slices(unit_minutes(items), self.count)[self.number]
        return {item.nodeid for item in items if unit_of(item) in units}


def head(root: Path) -> str:
    """The hash of the commit that is checked out."""
    process = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise pytest.UsageError(f"{root} has no commit, which `commit` needs: {process.stderr.strip()}")
    return process.stdout.strip()


def tree(root: Path) -> str:
    """The tree that is tested: a commit, with a mark if files differ from it."""
    command = ["git", "status", "--porcelain"]
    changed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    return head(root)[:12] + (" with changes" if changed.strip() else "")


class Progress:
    """Which tests of the proof have passed, and on which tree; in a file, so that the next run takes the others. A text
    beside it lists those that are left.

    It works in the one process that sees all reports; workers of xdist get what had passed at the start. A test that
    was skipped is left: it proved nothing.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._tree = path, tree(root)
        self.passed: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.passed_before = sorted(self.passed)
        self._collected: set[str] = set()
        self._not_passed: set[str] = set()
        self._called: set[str] = set()

    def collected(self, tests: Iterable[str]) -> None:
        """All tests of the proof, or of the slice, whether they have passed or not."""
        self._collected.update(tests)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[PASSED] = self.passed_before

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.collected(getattr(node, "workeroutput", {}).get(COLLECTED, ()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._not_passed.add(report.nodeid)
        elif report.when == "call":
            self._called.add(report.nodeid)
        if report.when == "teardown" and report.nodeid in self._called - self._not_passed:
            self.passed[report.nodeid] = self._tree
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(self.passed, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(self._path)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Nothing to run is a success if everything has passed before."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._collected and not self.left():
            session.exitstatus = pytest.ExitCode.OK

    def left(self) -> list[str]:
        return sorted(self._collected - self.passed.keys())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        trees = Counter(self.passed[test] for test in self._collected & self.passed.keys())
        where = ", ".join(f"{count} on {name}" for name, count in trees.items()) or "none"
        terminalreporter.section("the proof")
        terminalreporter.write_line(f"{len(self.left())} of {len(self._collected)} tests are left; passed: {where}")
        for test in self.left():
            terminalreporter.write_line(f"left: {test}")
        left = self._path.with_name(f"{self._path.stem}-left.txt")
        left.write_text("".join(f"{test}\n" for test in self.left()), encoding="utf-8")
        if not self.left() and set(trees) == {self._tree}:
            terminalreporter.write_line(f"All of them have passed on {self._tree}.")
        elif not self.left():
            terminalreporter.write_line(f"Not all on this tree: remove {self._path} to run all of them on it.")
