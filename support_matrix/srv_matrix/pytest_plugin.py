"""The pytest plugin by which tests become evidence. Writes only when asked: `pytest -m covers --srv-evidence FILE`.

    @covers("schedule_policy=lpm")
    def test_longest_prefix_goes_first(...): ...

    @pytest.mark.parametrize("policy", [pytest.param("lpm", marks=covers("schedule_policy=lpm"))])

The device is that of `--srv-evidence-device` (a platform's name), as its probe finds it here; what a simulated one
shows is E3 at most. Evidence of a tree that differs from its commit would be of no commit, so it is refused; with
`--srv-evidence-any-tree` it is written down as what it is, good for a comparison and never to be committed.
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
from srv_matrix.repository import find_repository

# What is made from the commit, and changes nothing that a test could show.
_IGNORED = ("support_matrix/evidence/", "support_matrix/inventory.json", "docs/support/")


def covers(*cells: str, level: str = "E4", note: str = "", variant: str = "") -> pytest.MarkDecorator:
    """Mark a test (or a parameter) as showing these cells: "argument=value", "argument", or "kind:name".

    `level`: what a pass amounts to where it runs. `note`: what weakens it ("forced path"). `variant`: the one whose
    path the test forces a newer device to take; then a note must say so.
    """
    if not cells:
        raise ValueError("a test that covers nothing needs no mark")
    if variant and not note:
        raise ValueError(f"what is forced to be {variant} wants a note that says so")
    Level[level]
    return pytest.mark.covers(*cells, level=level, note=note, variant=variant)


def marks_of(item: pytest.Item) -> dict[str, Any] | None:
    """What a test covers: {"covers": [...], "level": ..., "note": ..., "variant": ...}; None if nothing."""
    marks = list(item.iter_markers("covers"))
    if not marks:
        return None
    cells = dict.fromkeys(cell for mark in reversed(marks) for cell in mark.args)
    levels = [Level[mark.kwargs.get("level", "E4")] for mark in marks]
    notes = dict.fromkeys(note for mark in marks if (note := mark.kwargs.get("note", "")))
    variants = dict.fromkeys(variant for mark in marks if (variant := mark.kwargs.get("variant", "")))
    if len(variants) > 1:
        raise pytest.UsageError(f"{item.nodeid} is forced to be {' and '.join(variants)}: one test, one variant")
    return {
        "covers": list(cells),
        "level": min(levels).name,
        "note": ", ".join(notes),
        "variant": next(iter(variants), ""),
    }


@dataclass(eq=False)  # pytest keeps its plugins in sets
class _Recorder:
    """Evidence of one session, gathered test by test."""

    path: Path
    where: Mapping[str, str]
    most: Level
    found: dict[str, Evidence] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        mark = marks_of(item)
        if mark is not None and not report.skipped and (report.when == "call" or report.failed):
            outcome = "passed" if report.passed else "failed"
            self.found[item.nodeid] = Evidence(
                covers=tuple(mark["covers"]),
                level=min(Level[mark["level"]], self.most),
                test=item.nodeid,
                outcome=outcome,
                note=mark["note"],
                **{**self.where, **({"variant": mark["variant"]} if mark["variant"] else {})},
            )
        return report

    def pytest_sessionfinish(self) -> None:
        from srv_matrix.evidence import write_file

        write_file(self.path, self.found.values())

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"evidence of {len(self.found)} tests is in {self.path}")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("srv", "evidence for the support matrix of srv")
    group.addoption(
        "--srv-evidence",
        metavar="FILE",
        help="write what tests marked `covers` show to FILE (of a folder: to PLATFORM-VARIANT.jsonl in it)",
    )
    group.addoption("--srv-evidence-device", metavar="NAME", help="platform that the evidence is of")
    group.addoption(
        "--srv-evidence-any-tree",
        action="store_true",
        help="take a tree that differs from its commit, too: for a comparison, not to be committed",
    )
    group.addoption("--srv-covers", metavar="FILE", help="with --collect-only: write what each test covers to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "covers(*cells, level, note, variant): cells of the support matrix that a pass shows"
    )
    target = config.getoption("--srv-evidence")
    if target is None:
        return
    if config.pluginmanager.hasplugin("xdist") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--srv-evidence wants one process: leave -n out")
    where, most = _where(
        config.rootpath, config.getoption("--srv-evidence-device"), config.getoption("--srv-evidence-any-tree")
    )
    path = Path(target)
    if path.is_dir():
        path /= f"{where['platform']}-{where['variant']}.jsonl"
    config.pluginmanager.register(_Recorder(path, where, most), "srv-evidence-recorder")


def pytest_collection_finish(session: pytest.Session) -> None:
    target = session.config.getoption("--srv-covers")
    if target is not None:
        marks = {item.nodeid: mark for item in session.items if (mark := marks_of(item)) is not None}
        Path(target).write_text(json.dumps(marks), encoding="utf-8")


def _where(root: Path, platform: str | None, any_tree: bool) -> tuple[dict[str, str], Level]:
    """What evidence says of commit and device, and its highest level there; UsageError if there is none to speak of."""
    from srv.platform.probe import probe
    from srv.platform.registry import find_platforms

    repository = find_repository(root)
    found = find_platforms()
    if repository is None:
        raise pytest.UsageError(f"--srv-evidence: {root} is no checkout of srv")
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
        "variant": result.device.variant,
        "commit": commit + (CHANGED if changed else ""),
        "plugin_version": f"{found[platform].distribution} {found[platform].version}",
        "driver": versions,
        "device": result.device.name or result.device.variant,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    simulated = found[platform].loaded.simulated or result.device.simulated
    return where, Level.E3 if simulated else Level.E5
