"""The pytest plugin by which tests become evidence. Writes only when asked: `pytest -m covers --srv-evidence FILE`.

    @covers("schedule_policy=lpm", platform="cpu")
    def test_longest_prefix_goes_first(...): ...

    @pytest.mark.parametrize("policy", [pytest.param("lpm", marks=covers("schedule_policy=lpm", platform="cpu"))])

A mark names the platform whose device the test runs. A test that runs whichever device is asked for names none and
takes that device from the fixture `srv_device`. Evidence is of `--srv-evidence-device` (a platform's name), as its
probe finds it here, and of those tests alone that run it; what a simulated one shows is E3 at most.

Evidence of a tree that differs from its commit would be of no commit, so it is refused; with
`--srv-evidence-any-tree` it is written down as what it is, good for a comparison and never to be committed.
A file keeps the lines of tests that did not run to their end this time. A skip shows nothing: it is written, with its
reason, where a comparison looks for it, and not among the committed evidence.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from srv.errors import SrvError
from srv_matrix.records import CHANGED, Evidence, Level
from srv_matrix.repository import Repository, find_repository

# What is made from the commit, and changes nothing that a test could show.
_IGNORED = ("support_matrix/evidence/", "support_matrix/inventory.json", "docs/support/")


ANY_MACHINE = "cpu"  # what `srv_device` gives where nobody asks for a device: every machine has it


def covers(
    *cells: str, platform: str = "", level: str = "E4", note: str = "", variant: str = ""
) -> pytest.MarkDecorator:
    """Mark a test (or a parameter) as showing these cells: "argument=value", "argument", or "kind:name".

    `platform`: the one whose device the test runs; none if it takes its device from the fixture `srv_device`.
    `level`: what a pass amounts to where it runs. `note`: what weakens it ("forced path"). `variant`: the one whose
    path the test forces a newer device to take; then a note must say so.
    """
    if not cells:
        raise ValueError("a test that covers nothing needs no mark")
    if variant and not note:
        raise ValueError(f"what is forced to be {variant} wants a note that says so")
    Level[level]
    return pytest.mark.covers(*cells, platform=platform, level=level, note=note, variant=variant)


@pytest.fixture(scope="session")
def srv_device(request: pytest.FixtureRequest) -> str:
    """The platform that a test of any device must run on: that of `--srv-evidence-device`, or else the processor."""
    return str(request.config.getoption("--srv-evidence-device") or ANY_MACHINE)


def marks_of(item: pytest.Item) -> dict[str, Any] | None:
    """What a test covers, with keys "covers" (a list), "platform", "level", "note", "variant"; None if nothing.

    The platform is "" for one that runs whichever is asked for. UsageError if nobody can tell what it runs.
    """
    marks = list(item.iter_markers("covers"))
    if not marks:
        return None
    cells = dict.fromkeys(cell for mark in reversed(marks) for cell in mark.args)
    levels = [Level[mark.kwargs.get("level", "E4")] for mark in marks]
    said = {
        name: list(dict.fromkeys(text for mark in marks if (text := mark.kwargs.get(name, ""))))
        for name in ("platform", "note", "variant")
    }
    if len(said["variant"]) > 1:
        raise pytest.UsageError(f"{item.nodeid} is forced to be {' and '.join(said['variant'])}: one test, one variant")
    asks = "srv_device" in getattr(item, "fixturenames", ())
    if len(said["platform"]) + asks != 1:
        platforms = " and ".join([*said["platform"], *(["that of srv_device"] if asks else [])]) or "none"
        raise pytest.UsageError(
            f"{item.nodeid} covers cells, and the platform that it runs is {platforms}: say one, as in "
            'covers(..., platform="cpu"), or let the test take its device from the fixture srv_device'
        )
    return {
        "covers": list(cells),
        "platform": next(iter(said["platform"]), ""),
        "level": min(levels).name,
        "note": ", ".join(said["note"]),
        "variant": next(iter(said["variant"]), ""),
    }


@dataclass(eq=False)  # pytest keeps its plugins in sets
class _Recorder:
    """Evidence of one session, gathered test by test. `skips`: whether those that were skipped are written, too."""

    path: Path
    where: Mapping[str, str]
    most: Level
    skips: bool
    marks: dict[str, dict[str, Any]] = field(default_factory=dict)
    elsewhere: int = 0  # marked tests that run another platform
    begun: dict[str, Evidence] = field(default_factory=dict)
    found: list[Evidence] = field(default_factory=list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        marked = {item.nodeid: mark for item in session.items if (mark := marks_of(item)) is not None}
        self.marks = {test: mark for test, mark in marked.items() if mark["platform"] in ("", self.where["platform"])}
        self.elsewhere = len(marked) - len(self.marks)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        mark = self.marks.get(item.nodeid)
        if mark is None:
            return report
        if report.failed or report.when == "call" or (report.skipped and item.nodeid not in self.begun):
            self.begun[item.nodeid] = self._evidence(mark, report)
        if report.when == "teardown":  # a test whose end is not heard of has shown nothing
            evidence = self.begun.pop(item.nodeid, None)
            if evidence is not None and (self.skips or not evidence.skipped):
                self.found.append(evidence)
        return report

    def _evidence(self, mark: Mapping[str, Any], report: pytest.TestReport) -> Evidence:
        return Evidence(
            covers=tuple(mark["covers"]),
            level=min(Level[mark["level"]], self.most),
            test=report.nodeid,
            outcome=report.outcome,
            note=mark["note"],
            reason=_why_skipped(report) if report.skipped else "",
            variant=mark["variant"] or self.where["machine"],
            **self.where,
        )

    def pytest_sessionfinish(self) -> None:
        from srv_matrix.evidence import merge_file

        if self.found:
            merge_file(self.path, self.found)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = sum(each.skipped for each in self.found)
        told = f"evidence of {len(self.found)} tests is in {self.path}" + (f", {skipped} skipped" if skipped else "")
        if not self.found:
            told = f"no marked test of {self.where['platform']} ran; {self.path} is as it was"
        if self.elsewhere:
            told += f"; {self.elsewhere} marked tests run another platform"
        terminalreporter.write_line(told)


def _why_skipped(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    told = report.longrepr
    return (told[2] if isinstance(told, tuple) else str(told)).removeprefix("Skipped: ")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("srv", "evidence for the support matrix of srv")
    group.addoption(
        "--srv-evidence",
        metavar="FILE",
        help="put what tests marked `covers` show into FILE (of a folder: PLATFORM-VARIANT.jsonl in it)",
    )
    group.addoption("--srv-evidence-device", metavar="NAME", help="platform to run, and that the evidence is of")
    group.addoption(
        "--srv-evidence-any-tree",
        action="store_true",
        help="take a tree that differs from its commit, too: for a comparison, not to be committed",
    )
    group.addoption("--srv-covers", metavar="FILE", help="with --collect-only: write what each test covers to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "covers(*cells, platform, level, note, variant): cells of the support matrix that a pass shows"
    )
    target = config.getoption("--srv-evidence")
    if target is None:
        return
    if config.pluginmanager.hasplugin("xdist") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--srv-evidence wants one process: leave -n out")
    repository = find_repository(config.rootpath)
    if repository is None:
        raise pytest.UsageError(f"--srv-evidence: {config.rootpath} is no checkout of srv")
    where, most = _where(
        repository, config.getoption("--srv-evidence-device"), config.getoption("--srv-evidence-any-tree")
    )
    path = Path(target).absolute()
    if path.is_dir():
        path /= f"{where['platform']}-{where['machine']}.jsonl"
    _assert_evidence_or_nothing(path)
    committed = path.parent.resolve() == repository.evidence.resolve()
    config.pluginmanager.register(_Recorder(path, where, most, skips=not committed), "srv-evidence-recorder")


def _assert_evidence_or_nothing(path: Path) -> None:
    """What lies there is kept beside what is new, so it must be known to be evidence before any test runs."""
    from srv_matrix.evidence import read_file

    try:
        if path.exists():
            read_file(path)
    except SrvError as error:
        raise pytest.UsageError(f"--srv-evidence: {error}") from error


def pytest_collection_finish(session: pytest.Session) -> None:
    target = session.config.getoption("--srv-covers")
    if target is not None:
        marks = {item.nodeid: mark for item in session.items if (mark := marks_of(item)) is not None}
        Path(target).write_text(json.dumps(marks), encoding="utf-8")


def _where(repository: Repository, platform: str | None, any_tree: bool) -> tuple[dict[str, str], Level]:
    """What evidence says of commit and device, and its highest level there; UsageError if there is none to speak of."""
    from srv.platform.probe import probe
    from srv.platform.registry import find_platforms

    found = find_platforms()
    if platform is None or platform not in found:
        raise pytest.UsageError(f"--srv-evidence-device is {platform}; platforms are {', '.join(found)}")
    try:
        changed = [file for file in repository.changed_files() if not file.startswith(_IGNORED)]
        commit = repository.head()
    except SrvError as error:
        raise pytest.UsageError(f"--srv-evidence: {error}") from error
    if changed and not any_tree:
        raise pytest.UsageError(f"--srv-evidence: commit first, the tree differs: {', '.join(changed[:5])}")
    result = probe(found[platform])
    if result.device is None or not result.available:
        raise pytest.UsageError(f"--srv-evidence-device {platform} cannot be used here: {result.reason}")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.device.versions.items()))
    where = {
        "platform": platform,
        "machine": result.device.variant,
        "commit": commit + (CHANGED if changed else ""),
        "plugin_version": f"{found[platform].distribution} {found[platform].version}",
        "driver": versions,
        "device": result.device.name or result.device.variant,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    simulated = found[platform].loaded.simulated or result.device.simulated
    return where, Level.E3 if simulated else Level.E5
