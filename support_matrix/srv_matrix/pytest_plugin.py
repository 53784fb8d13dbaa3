"""The pytest plugin that records evidence of tests, if it is enabled: `pytest -m covers --srv-evidence FILE`.

    @covers("schedule_policy=lpm", platform="cpu")
    def test_longest_prefix_goes_first(...): ...

    @pytest.mark.parametrize("policy", [pytest.param("lpm", marks=covers("schedule_policy=lpm", platform="cpu"))])

A mark names the platform on whose device the test runs. A test that can run on any device names none, and takes its
device from the fixture `srv_device`. Evidence is recorded for `--srv-evidence-device` (a platform's name), with the
device that its probe finds, and only for tests that run on it. The level of a simulated device is E3 at most.

A tree with uncommitted changes is refused, because its evidence would belong to no commit. With
`--srv-evidence-any-tree` it is recorded and marked as such; it is only for comparisons and must not be committed.
A file keeps the lines of tests that were not completed in this run. Skipped tests are recorded with their reason for
comparisons, but not in the committed evidence.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from srv.errors import SrvError
from srv_matrix.records import CHANGED, Evidence, Level, split_versions
from srv_matrix.repository import Repository, find_repository

ANY_MACHINE = "cpu"  # the default of `srv_device`: every machine has it


def covers(
    *cells: str, platform: str = "", level: str = "E4", note: str = "", variant: str = ""
) -> pytest.MarkDecorator:
    """Mark a test (or a parameter) as evidence for these cells: "argument=value", "argument", or "kind:name".

    `platform`: the platform on whose device the test runs; empty if it takes its device from the fixture `srv_device`.
    `level`: the level of the evidence if the test passes. `note`: a limitation of the evidence ("forced path").
    `variant`: the variant whose code path the test forces on a newer device; it requires a note.
    """
    if not cells:
        raise ValueError("covers needs at least one cell")
    if variant and not note:
        raise ValueError(f'a test with variant={variant!r} needs a note, such as "forced path"')
    Level[level]
    return pytest.mark.covers(*cells, platform=platform, level=level, note=note, variant=variant)


@pytest.fixture(scope="session")
def srv_device(request: pytest.FixtureRequest) -> str:
    """The platform on which a test for any device must run: `--srv-evidence-device`, or else the CPU."""
    return str(request.config.getoption("--srv-evidence-device") or ANY_MACHINE)


def marks_of(item: pytest.Item) -> dict[str, Any] | None:
    """The mark of a test with keys "covers" (a list), "platform", "level", "note", "variant"; None without a mark.

    The platform is "" if the test can run on any. UsageError if its platform is missing or ambiguous.
    """
    marks = list(item.iter_markers("covers"))
    if not marks:
        return None
    cells = dict.fromkeys(cell for mark in reversed(marks) for cell in mark.args)
    levels = [Level[mark.kwargs.get("level", "E4")] for mark in marks]
    values = {
        name: list(dict.fromkeys(text for mark in marks if (text := mark.kwargs.get(name, ""))))
        for name in ("platform", "note", "variant")
    }
    if len(values["variant"]) > 1:
        variants = " and ".join(values["variant"])
        raise pytest.UsageError(f"{item.nodeid} must have at most one variant, but has {variants}")
    any_device = "srv_device" in getattr(item, "fixturenames", ())
    if len(values["platform"]) + any_device != 1:
        platforms = " and ".join([*values["platform"], *(["that of srv_device"] if any_device else [])]) or "none"
        raise pytest.UsageError(
            f"{item.nodeid} must run on exactly one platform, but has {platforms}. Set one, as in "
            'covers(..., platform="cpu"), or use the fixture srv_device'
        )
    return {
        "covers": list(cells),
        "platform": next(iter(values["platform"]), ""),
        "level": min(levels).name,
        "note": ", ".join(values["note"]),
        "variant": next(iter(values["variant"]), ""),
    }


class _Marker:
    """Attaches the mark of a test to its reports, in the process that runs it: xdist's workers send it along."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.__dict__.update(srv_mark=marks_of(item))
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """A mark that is not valid is an error before any test runs."""
        for item in session.items:
            marks_of(item)


@dataclass(eq=False)  # pytest keeps its plugins in sets
class _Recorder:
    """Records the evidence of a session. `where`: platform, commit and device. `skips`: whether to record skips."""

    path: Path
    where: Mapping[str, Any]
    max_level: Level
    skips: bool
    lines: Sequence[Evidence]  # of the file
    elsewhere: int = 0  # number of marked tests that ran on another platform
    running: dict[str, Evidence] = field(default_factory=dict)
    found: list[Evidence] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        mark = getattr(report, "srv_mark", None)
        if mark is None:
            if report.failed and not hasattr(report, "srv_mark"):  # xdist's own, of a test that ended its worker
                self._failed(report.nodeid)
            return
        if mark["platform"] not in ("", self.where["platform"]):
            self.elsewhere += report.when == "teardown"
            return
        if report.failed or report.when == "call" or (report.skipped and report.nodeid not in self.running):
            self.running[report.nodeid] = self._evidence(mark, report)
        if report.when == "teardown":  # without its teardown a test is incomplete
            evidence = self.running.pop(report.nodeid, None)
            if evidence is not None and (self.skips or not evidence.skipped):
                self._add(evidence)

    def _failed(self, test: str) -> None:
        """The test's line from an earlier run, if there is one, becomes one of a failure."""
        for line in self.lines:
            if line.test == test:
                self._add(replace(line, outcome="failed", commit=self.where["commit"], date=self.where["date"]))

    def _add(self, evidence: Evidence) -> None:
        """Into the file at once: a run on a device that is lent for minutes may be ended at any time."""
        from srv_matrix.evidence import merged, write_file

        self.lines = merged(self.lines, evidence)
        write_file(self.path, self.lines)
        self.found.append(evidence)

    def _evidence(self, mark: Mapping[str, Any], report: pytest.TestReport) -> Evidence:
        return Evidence(
            covers=tuple(mark["covers"]),
            level=min(Level[mark["level"]], self.max_level),
            test=report.nodeid,
            outcome=report.outcome,
            note=mark["note"],
            reason=_skip_reason(report) if report.skipped else "",
            variant=mark["variant"] or self.where["machine"],
            **self.where,
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = sum(entry.skipped for entry in self.found)
        line = f"evidence of {len(self.found)} tests is in {self.path}" + (f", {skipped} skipped" if skipped else "")
        if not self.found:
            line = f"no marked test of {self.where['platform']} was run; {self.path} is unchanged"
        if self.elsewhere:
            line += f"; {self.elsewhere} marked tests run on another platform"
        terminalreporter.write_line(line)


def _skip_reason(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        from srv_matrix.evidence import EXPECTED

        return f"{EXPECTED}: {report.wasxfail}"
    text = report.longrepr
    return (text[2] if isinstance(text, tuple) else str(text)).removeprefix("Skipped: ")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("srv", "evidence for the support matrix of srv")
    group.addoption(
        "--srv-evidence",
        metavar="FILE",
        help="record the evidence of tests marked `covers` in FILE (in a folder: as PLATFORM-VARIANT.jsonl)",
    )
    group.addoption("--srv-evidence-device", metavar="NAME", help="platform on which to run tests and record evidence")
    group.addoption(
        "--srv-evidence-any-tree",
        action="store_true",
        help="also record a tree with uncommitted changes, for a comparison; not to be committed",
    )
    group.addoption("--srv-covers", metavar="FILE", help="with --collect-only: write the marks of all tests to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "covers(*cells, platform, level, note, variant): cells of the support matrix that the test is evidence for",
    )
    target = config.getoption("--srv-evidence")
    if target is None:
        return
    config.pluginmanager.register(_Marker(), "srv-evidence-marker")
    if hasattr(config, "workerinput"):  # a worker of xdist: the process that started it records
        return
    repository = find_repository(config.rootpath)
    if repository is None:
        raise pytest.UsageError(f"--srv-evidence: {config.rootpath} is not a checkout of srv")
    where, max_level = _session_facts(
        repository, config.getoption("--srv-evidence-device"), config.getoption("--srv-evidence-any-tree")
    )
    path = Path(target).absolute()
    if path.is_dir():
        path /= f"{where['platform']}-{where['machine']}.jsonl"
    lines = _existing_evidence(path)
    committed = path.parent.resolve() == repository.evidence.resolve()
    config.pluginmanager.register(_Recorder(path, where, max_level, not committed, lines), "srv-evidence-recorder")


def _existing_evidence(path: Path) -> Sequence[Evidence]:
    """The existing lines of the file, which are kept; UsageError before any test runs if they are not valid."""
    from srv_matrix.evidence import read_file

    try:
        return read_file(path) if path.exists() else ()
    except SrvError as error:
        raise pytest.UsageError(f"--srv-evidence: {error}") from error


def pytest_collection_finish(session: pytest.Session) -> None:
    target = session.config.getoption("--srv-covers")
    if target is not None:
        marks = {item.nodeid: mark for item in session.items if (mark := marks_of(item)) is not None}
        Path(target).write_text(json.dumps(marks), encoding="utf-8")


def _session_facts(repository: Repository, platform: str | None, any_tree: bool) -> tuple[dict[str, Any], Level]:
    """The evidence fields that describe platform, commit and device, and the maximum level; UsageError if invalid."""
    from srv.platform.probe import probe
    from srv.platform.registry import find_platforms

    platforms = find_platforms()
    if platform is None or platform not in platforms:
        raise pytest.UsageError(f"--srv-evidence-device is {platform}; platforms are {', '.join(platforms)}")
    try:
        changed = repository.uncommitted()
        commit = repository.head()
    except SrvError as error:
        raise pytest.UsageError(f"--srv-evidence: {error}") from error
    if changed and not any_tree:
        raise pytest.UsageError(f"--srv-evidence: commit first, these files have changed: {', '.join(changed[:5])}")
    result = probe(platforms[platform])
    if result.device is None or not result.available:
        raise pytest.UsageError(f"--srv-evidence-device {platform} is not available on this machine: {result.reason}")
    simulated = platforms[platform].loaded.simulated or result.device.simulated
    plugin_version = f"{platforms[platform].distribution} {platforms[platform].version}"
    versions, simulator = split_versions(result.device.versions, plugin_version, simulated=simulated)
    where = {
        "platform": platform,
        "machine": result.device.variant,
        "commit": commit + (CHANGED if changed else ""),
        "plugin_version": plugin_version,
        "versions": versions,
        "simulator": simulator,
        "device": result.device.name or result.device.variant,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return where, Level.E3 if simulated else Level.E5
