"""A pytest plugin that skips the tests that have not begun when the time is up, and lists their files.

    pytest -p time_budget --seconds 40 --left-out build/check/left-out.txt

`make check` passes these options.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

REASON = "the time was up"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("srv-time-budget", "a time after which no test begins")
    group.addoption("--seconds", type=float, metavar="N", help="begin no test N seconds after collection")
    group.addoption("--left-out", type=Path, metavar="FILE", help="write the files of which a test was left out")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Budget(config.getoption("--seconds")), "srv-budget")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_LeftOut(config.getoption("--left-out")), "srv-left-out")


class _Budget:
    """Skips tests in the process that runs them. What importing them takes does not count."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0.0

    def pytest_collection_finish(self) -> None:
        self._until = time.monotonic() + self._seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self._until:
            pytest.skip(REASON)


class _LeftOut:
    """Collects the files of which a test was left out, in the one process that sees all reports."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple) and report.longrepr[2] == f"Skipped: {REASON}":
            self._files.add(report.nodeid.partition("::")[0])

    def pytest_sessionfinish(self) -> None:
        self._path.write_text("".join(f"{file}\n" for file in sorted(self._files)), encoding="utf-8")
