"""Record evidence again, the oldest first: `srv matrix record`, which is `make evidence`.

The tests of a file that are due on a place run in one pytest, so that they share fixtures. Its plugin writes each line
when the test has ended: a run that reaches its time limit, or is interrupted, loses nothing, and the next one goes on.
This module writes no line itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from srv_matrix.ages import Age, Ages, ages_of
from srv_matrix.evidence import Marks, read_folder, read_marks
from srv_matrix.places import Place
from srv_matrix.records import Evidence
from srv_matrix.repository import MatrixError, Repository

_END_S = 60  # for the fixtures of a run that is ended
_ALL_RAN = (0, 1)  # exit statuses of pytest: all passed, some failed


class Slice(NamedTuple):
    """The tests of one file that are due on a place. The one with the lowest `rank` runs first."""

    rank: tuple[int, int, int]
    place: Place
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.tests[0].partition("::")[0]


def due(
    place: Place, marks: Marks, evidence: Iterable[Evidence], ages: Ages, tried: Collection[str] = ()
) -> list[Slice]:
    """What to run on a place: files in the order of the oldest evidence of their tests.

    A test without evidence is the oldest; if the place has none at all, the newest. Left out are tests whose evidence
    is of the present code, and those that were `tried` on this commit.
    """
    of_place = (line for line in evidence if (line.platform, line.machine) == (place.platform, place.variant))
    commits = {line.test: line.commit for line in of_place}
    ranks: dict[str, dict[str, tuple[int, int, int]]] = {}
    for test, mark in marks.items():
        age = ages.get((place.platform, commits.get(test, "")))
        if place.runs(test, mark) and test not in tried and age != Age(0, 0):
            rank = (0 if commits else 2, 0, 0) if age is None else (1, -age.commits, -age.lines)
            ranks.setdefault(test.partition("::")[0], {})[test] = rank
    slices = (Slice(min(tests.values()), place, tuple(tests)) for tests in ranks.values())
    return sorted(slices, key=lambda part: part.rank)


@dataclass
class Recording:
    """A run over some places, until `end` (of `time.monotonic`)."""

    repository: Repository
    places: Sequence[Place]
    end: float

    def run(self) -> bool:
        """Record until nothing is due or the time is over, and print what becomes of it; whether no test failed."""
        if files := self.repository.uncommitted():
            raise MatrixError(f"evidence names the commit that was tested. Commit first: {', '.join(files[:5])}")
        tried = _Tried(self.repository.kept / "tried.json", self.repository.head())
        pending = self._due(tried)
        failed = 0
        while pending and time.monotonic() < self.end:
            part = pending.pop(0)
            before = {line.test: line for line in self._lines(part)}
            if self._run(part) in _ALL_RAN:
                tried.add(part)
            fresh = [line for line in self._lines(part) if line != before.get(line.test)]
            lost = [line.test for line in fresh if not line.passed]
            failed += len(lost)
            print(f"{part.place.name} {part.file}: {len(fresh)} of {len(part.tests)} recorded", flush=True)
            for test in lost:
                print(f"  failed: {test}", flush=True)
        self._report(tried)
        return not failed

    def _due(self, tried: _Tried) -> list[Slice]:
        evidence = read_folder(self.repository.evidence)
        marks, ages = read_marks(self.repository), ages_of(evidence, self.repository)
        slices = [part for place in self.places for part in due(place, marks, evidence, ages, tried.of(place))]
        return sorted(slices, key=lambda part: part.rank)

    def _lines(self, part: Slice) -> list[Evidence]:
        """The lines of the slice's tests."""
        lines, place = read_folder(self.repository.evidence), (part.place.platform, part.place.variant)
        return [line for line in lines if line.test in part.tests and (line.platform, line.machine) == place]

    def _run(self, part: Slice) -> int:
        """Run pytest until the end; its exit status."""
        options = [f"--srv-evidence={self.repository.evidence}", f"--srv-evidence-device={part.place.platform}"]
        command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", *options, *part.tests]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SRV_")}
        process = subprocess.Popen(
            command, cwd=self.repository.root, env={**environment, **part.place.settings}, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < self.end:
                time.sleep(0.1)
        finally:
            _end(process)
        return process.returncode

    def _report(self, tried: _Tried) -> None:
        slices = self._due(tried)
        for place in self.places:
            tests = sum(len(part.tests) for part in slices if part.place is place)
            print(f"{place.name}: {f'{tests} tests are due' if tests else 'nothing is due'}")
        print("Run it again to go on." if slices else "Next: make matrix, then commit evidence and pages.")


def _end(process: subprocess.Popen[bytes]) -> None:
    """If pytest still runs, interrupt it as Ctrl-C does, and kill it with its children if it does not end."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Tried:
    """The tests that have been run on a commit, by place, recorded or not: a test that is skipped has no line."""

    def __init__(self, path: Path, commit: str) -> None:
        self._path, self._commit = path, commit
        self._tests: dict[str, list[str]] = {}
        if path.exists():
            stored: Mapping[str, dict[str, list[str]]] = json.loads(path.read_text(encoding="utf-8"))
            self._tests = stored.get(commit, {})

    def of(self, place: Place) -> Collection[str]:
        return frozenset(self._tests.get(place.name, ()))

    def add(self, part: Slice) -> None:
        self._tests.setdefault(part.place.name, []).extend(part.tests)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({self._commit: self._tests}), encoding="utf-8")
