"""How long each test takes: one line of JSON per test in a file per run, and sums by folder.

    python tests/helpers/times.py build/times/*.jsonl [--depth 3]

`wall` and `cpu` are seconds of setup, call and teardown together; `cpu` is that of the process that ran the test and of
the children that it has waited for, so that it hardly depends on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Time:
    """What one test took, in seconds."""

    test: str
    outcome: str
    wall: float
    cpu: float


class Stopwatch:
    """Measures each phase of a test in the process that runs it: the result travels with the report."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool | None, bool | None]:
        self._before = _cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":
            report.__dict__["srv_cpu"] = _cpu_seconds() - self._before
        return report


class Recorder:
    """Writes the times of a run to a file, in the one process that sees all reports."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wall: dict[str, float] = {}
        self._outcome: dict[str, str] = {}
        self._times: list[Time] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._wall[test] = self._wall.get(test, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcome[test] = report.outcome
        if report.when == "teardown":
            outcome = self._outcome.get(test, report.outcome)
            cpu = float(report.__dict__.get("srv_cpu", 0.0))
            self._times.append(Time(test, outcome, round(self._wall[test], 3), round(cpu, 3)))

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(asdict(time)) for time in sorted(self._times, key=lambda time: -time.wall))
        self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"seconds by folder, in {self._path}")
        for line in by_folder(self._times, depth=3, most=12):
            terminalreporter.write_line(line)


def by_folder(times: Iterable[Time], depth: int, most: int | None = None) -> list[str]:
    """A line for each folder of `depth` levels: wall and CPU seconds, tests, and its name; the longest first."""
    sums: dict[str, tuple[float, float, int]] = {}
    for time in times:
        parts = time.test.partition("::")[0].split("/")
        folder = "/".join(parts[:depth])
        wall, cpu, count = sums.get(folder, (0.0, 0.0, 0))
        sums[folder] = (wall + time.wall, cpu + time.cpu, count + 1)
    total = tuple(sum(column) for column in zip(*sums.values(), strict=True)) or (0, 0, 0)
    rows = sorted(sums.items(), key=lambda row: -row[1][0])[:most]
    lines = [("wall", "cpu", "tests", "folder")]
    lines += [(f"{wall:.0f}", f"{cpu:.0f}", str(count), folder) for folder, (wall, cpu, count) in rows]
    lines.append((f"{total[0]:.0f}", f"{total[1]:.0f}", str(total[2]), "all"))
    return [f"{wall:>7} {cpu:>7} {count:>6}  {folder}" for wall, cpu, count, folder in lines]


def read_times(paths: Iterable[Path]) -> list[Time]:
    return [Time(**json.loads(line)) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Sums the times of tests by folder.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--depth", type=int, default=3, help="levels of folders, a file being the last (default 3)")
    options = parser.parse_args()
    print("\n".join(by_folder(read_times(options.files), options.depth)))
