"""Slow tests that rarely break run when the code that they cover has changed, and always with `--full`.

    @pytest.mark.when_changed("kernels/srv_kernels/cpu", "tests/kernels/cpu")
    def test_no_sanitizer_complains(): ...

A test's digest is computed from the contents of all files under the paths of its marks, and of the test's own file.
`make evidence` runs these tests and records the digest of each that passes, alongside the evidence, in
support_matrix/evidence/digests.json. A test whose recorded digest equals that of the tree is skipped with that reason.
`make test-all FULL=1` skips none.

Triton's kernels run in Triton's interpreter, unless TRITON_INTERPRET=0 is set, on a machine with a GPU.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import socket
import subprocess
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from times import Recorder, Stopwatch

os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported, which other packages may do

settings.load_profile("ci")  # the same examples everywhere; others with --hypothesis-profile=default

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "support_matrix" / "evidence" / "digests.json"
MARK = "when_changed"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("srv-digests", "tests that run when the code that they cover has changed")
    group.addoption("--times", metavar="FILE", help="write how long each test takes to FILE, as lines of JSON")
    group.addoption("--full", action="store_true", help="run them in any case")
    group.addoption("--record-digests", action="store_true", help=f"record those that pass in {RECORD.name}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(*paths): run if a tracked file under these paths, or the test, changed")
    if (path := config.getoption("--times")) is not None:
        config.pluginmanager.register(Stopwatch(), "srv-stopwatch")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Recorder(Path(path)), "srv-times")
    if config.getoption("--record-digests") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(), "srv-digest-recorder")


def digest_of(item: pytest.Item) -> str | None:
    """The digest of what a test covers; None without a mark."""
    marks = list(item.iter_markers(MARK))
    if not marks:
        return None
    own = item.path.relative_to(ROOT).as_posix()
    return digest(frozenset([own, *(path for mark in marks for path in mark.args)]))


@cache
def digest(paths: frozenset[str], root: Path = ROOT) -> str:
    """SHA-256 of the names and contents of the files under `paths` that git tracks or does not ignore.

    UsageError for a path without any: it has moved, or the mark has a mistake.
    """
    total = hashlib.sha256()
    for path in sorted(paths):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate", "--", path]
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
        names = [name for name in listed.split("\0") if name and (root / name).is_file()]
        if not names:
            raise pytest.UsageError(f"{MARK}: no file under {path}")
        for name in sorted(names):
            total.update(f"{name}\0".encode() + hashlib.sha256((root / name).read_bytes()).digest())
    return total.hexdigest()


def recorded() -> dict[str, dict[str, str]]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


@pytest.hookimpl(trylast=True)  # after deselection
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    passed = recorded()
    for item in items:
        if (now := digest_of(item)) is not None and (last := passed.get(item.nodeid)) and last["digest"] == now:
            reason = f"the code that it covers has not changed since it passed on {last['date']}; --full runs it"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed:
        report.srv_digest = digest_of(item)  # type: ignore[attr-defined]  # travels from a worker with the report
    return report


class _Recorder:
    """Collects the digests of tests that passed, in the one process that sees all reports."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (found := getattr(report, "srv_digest", None)) is not None:
            self._found[report.nodeid] = found

    def pytest_sessionfinish(self) -> None:
        if not self._found:
            return
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        lines = recorded() | {test: {"date": today, "digest": each} for test, each in self._found.items()}
        RECORD.write_text(json.dumps(lines, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which another program listens: a launch that is not refused earlier fails there, without an engine."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]
