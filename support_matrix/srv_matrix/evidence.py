"""Evidence: lines of JSON in `support_matrix/evidence/`, one per test that was run. Reads, writes and checks them.

Evidence is valid only if its test exists and covers the cells, the tested commit is an ancestor of HEAD, and platform,
level, variant and note match the test's mark. This module runs no test.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from srv_matrix.kept import code_files, files_below, kept, key_of
from srv_matrix.records import CHANGED, Evidence, Key, Level
from srv_matrix.repository import MatrixError, Repository

OUTCOMES = ("passed", "failed", "skipped")
EXPECTED = "expected to fail"  # begins the reason of such a test
PLUGIN = "srv_matrix.pytest_plugin"
MARKED = "srv_matrix.pytest_plugin import covers"  # occurs in every file with marks
FOLDERS = ("tests", "platforms", "plugins")  # with test files
_MAY_BE_EMPTY = ("note", "reason", "simulator")
_TEXT_FIELDS = tuple(field.name for field in fields(Evidence) if field.name not in ("covers", "level", "versions"))
_COLLECT_TIMEOUT_S = 300
Marks = Mapping[str, Mapping[str, Any]]  # of tests, as `srv_matrix.pytest_plugin.marks_of` returns them


def to_line(evidence: Evidence) -> str:
    """One line of a `.jsonl` file."""
    return json.dumps(asdict(evidence) | {"level": evidence.level.name}, ensure_ascii=False)


def from_line(line: str) -> Evidence:
    """The inverse of `to_line`; ValueError with the reason for any other text."""
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError("is not a JSON object")
    if unknown := raw.keys() - {field.name for field in fields(Evidence)}:
        raise ValueError(f"has the unknown fields {', '.join(sorted(unknown))}")
    return _checked(raw)


def _checked(raw: Mapping[str, Any]) -> Evidence:
    texts = {name: raw.get(name, "") for name in _TEXT_FIELDS}
    for name, text in texts.items():
        if not isinstance(text, str) or not (text or name in _MAY_BE_EMPTY):
            raise ValueError(f"has no {name}")
    covers = raw.get("covers")
    if not isinstance(covers, list) or not covers or not all(isinstance(cell, str) for cell in covers):
        raise ValueError("has no list of covered cells")
    versions = raw.get("versions")
    if not isinstance(versions, dict) or not all(isinstance(version, str) for version in versions.values()):
        raise ValueError("has no versions by name")
    if raw.get("level") not in Level.__members__:
        raise ValueError(f"has the level {raw.get('level')!r}; levels are {', '.join(Level.__members__)}")
    if texts["outcome"] not in OUTCOMES:
        raise ValueError(f"has the outcome {texts['outcome']!r}; outcomes are {', '.join(OUTCOMES)}")
    datetime.date.fromisoformat(texts["date"])
    return Evidence(covers=tuple(covers), level=Level[raw["level"]], versions=versions, **texts)


def read_file(path: Path) -> tuple[Evidence, ...]:
    """The evidence of one file; MatrixError with file and line if it is invalid."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        remedy = "Pass a file that `pytest -m covers --srv-evidence FILE --srv-evidence-device NAME` has written"
        raise MatrixError(f"the evidence {path} cannot be read: {error}. {remedy}") from error
    lines: list[Evidence] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            lines.append(from_line(line))
        except ValueError as error:
            remedy = "Evidence is written by pytest only (support_matrix/evidence/README.md): record it again"
            raise MatrixError(f"{path.name} line {number}: {error}. {remedy}") from error
    return tuple(lines)


def read_folder(folder: Path) -> tuple[Evidence, ...]:
    """All evidence of a folder, in the order of file names."""
    return tuple(line for path in sorted(folder.glob("*.jsonl")) for line in read_file(path))


def write_file(path: Path, evidence: Iterable[Evidence]) -> None:
    """Write one file, sorted by platform, variant and test, so that a diff shows only changed evidence.

    The file is replaced atomically.
    """
    ordered = sorted(evidence, key=lambda line: (line.platform, line.variant, line.test, line.covers))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text("".join(to_line(line) + "\n" for line in ordered), encoding="utf-8")
    new.replace(path)


def merged(lines: Iterable[Evidence], fresh: Evidence) -> list[Evidence]:
    """The lines with one of a new run, which replaces that of the same test, platform and machine."""
    return [*(line for line in lines if _run_of(line) != _run_of(fresh)), fresh]


def _run_of(evidence: Evidence) -> tuple[str, str, str]:
    return evidence.test, evidence.platform, evidence.machine


def marked_files(repository: Repository) -> list[str]:
    """The test files that use `covers`, relative to the root."""
    return [
        path.relative_to(repository.root).as_posix()
        for folder in FOLDERS
        for path in sorted((repository.root / folder).rglob("test_*.py"))
        if MARKED in path.read_text(encoding="utf-8")
    ]


def read_marks(repository: Repository) -> Marks:
    """The marks of all tests, collected once for the same tests, code and SRV_ variables."""
    root = repository.root
    tests = [path for folder in FOLDERS for path in files_below(root / folder)]
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("SRV_")]
    projects = [path for path in (root / "pyproject.toml",) if path.is_file()]
    key = key_of([*code_files("pytest_plugin"), *projects, *tests], *settings)
    make = partial(collect_marks, repository, marked_files(repository))
    return kept(repository.kept, "marks", key, dict[str, dict[str, Any]], make)


def collect_marks(repository: Repository, files: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The `covers` marks of the tests in these files, by test id, as collected by pytest.

    Each mark has the form of `srv_matrix.pytest_plugin.marks_of`. MatrixError if a file cannot be collected.
    """
    present = [file for file in dict.fromkeys(files) if (repository.root / file).is_file()]
    if not present:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "marks.json"
        options = ["--collect-only", "-q", "-p", PLUGIN, f"--srv-covers={out}"]
        command = [sys.executable, "-P", "-m", "pytest", *options, *present]
        process = subprocess.run(
            command, cwd=repository.root, capture_output=True, text=True, timeout=_COLLECT_TIMEOUT_S, check=False
        )
        if process.returncode != 0 or not out.exists():
            raise MatrixError(
                f"pytest cannot collect {', '.join(present)}: {(process.stdout + process.stderr)[-2000:]}"
            )
        marks: dict[str, dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return marks


def faults(
    evidence: Sequence[Evidence],
    cells: Iterable[Key],
    marks: Marks,
    is_ancestor: Callable[[str], bool | None],
) -> list[str]:
    """All faults of the evidence, one sentence each. `marks`: the result of `collect_marks`.

    `is_ancestor` returns None if this checkout cannot decide it; that is not a fault of the evidence.
    """
    known_cells = set(cells)
    tests = Counter(_run_of(line) for line in evidence)
    problems = [f"evidence of {key[0]}: there are {n} lines for {key[1]}:{key[2]}" for key, n in tests.items() if n > 1]
    commits = {commit: is_ancestor(commit) for commit in dict.fromkeys(line.commit for line in evidence)}
    for line in evidence:
        problems += [f"evidence of {line.test}: {fault}" for fault in _faults_of(line, known_cells, marks, commits)]
    return problems


def prune(
    folder: Path,
    cells: Iterable[Key],
    marks: Marks,
    is_ancestor: Callable[[str], bool | None],
) -> list[str]:
    """Remove every line with a fault from the files of a folder; returns the faults, one sentence each."""
    known_cells = set(cells)
    reasons: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = read_file(path)
        faults_by_line = [faults([line], known_cells, marks, is_ancestor) for line in lines]
        reasons += [f"{path.name}: {fault}" for line_faults in faults_by_line for fault in line_faults]
        remaining = [line for line, line_faults in zip(lines, faults_by_line, strict=True) if not line_faults]
        if not remaining:
            path.unlink()
        elif len(remaining) < len(lines):
            write_file(path, remaining)
    return reasons


def _faults_of(
    evidence: Evidence, known_cells: set[Key], marks: Marks, commits: Mapping[str, bool | None]
) -> list[str]:
    problems: list[str] = []
    mark = marks.get(evidence.test)
    if mark is None:
        problems.append("there is no such test, or it is not marked with covers")
    else:
        problems += _mark_faults(evidence, mark)
    for cell in evidence.covers:
        if (cell, evidence.platform, evidence.variant) not in known_cells:
            fault = f"{evidence.platform}:{evidence.variant} has no cell {cell} that a test can cover"
            problems.append(
                fault + ("" if "=" in cell else "; if the values of an argument are cells, cover one of them")
            )
    if evidence.commit.endswith(CHANGED):
        problems.append(f"its tree had uncommitted changes ({evidence.commit}): commit, and record it again")
    elif commits[evidence.commit] is False:
        problems.append(f"commit {evidence.commit} is not an ancestor of HEAD")
    if evidence.skipped:
        problems.append(f"it was skipped ({evidence.reason}), so it shows nothing")
    elif not evidence.passed:
        problems.append(f"its outcome is {evidence.outcome}: fix the test, or declare the cell as unsupported")
    return problems


def _mark_faults(evidence: Evidence, mark: Mapping[str, Any]) -> list[str]:
    """Differences between a line and its test's mark."""
    problems = [f"the test does not cover {cell}" for cell in sorted(set(evidence.covers) - set(mark["covers"]))]
    if (ran := mark["platform"]) not in ("", evidence.platform):
        problems.append(f"the evidence is for platform {evidence.platform}, but the test runs on {ran}")
    if evidence.level > Level[mark["level"]]:
        problems.append(f"the evidence has level {evidence.level.name}, but the test's mark has {mark['level']}")
    forced = mark["variant"]
    if evidence.variant != (forced or evidence.machine):
        actual = f"the test forces {forced}" if forced else f"it was recorded on {evidence.machine}"
        problems.append(f"the evidence is for {evidence.variant}, but {actual}")
    if evidence.note != mark["note"]:
        problems.append(f"its note is {_or_empty(evidence.note)}, but that of the mark is {_or_empty(mark['note'])}")
    return problems


def compare(committed: Iterable[Evidence], fresh: Iterable[Evidence], *, strict: bool) -> tuple[list[str], list[str]]:
    """Faults and notes about tests that have committed evidence and did not pass in a new run on their platform.

    A test that fails, or that is expected to fail, is a fault. One that was skipped is a note, unless `strict` and its
    evidence is from a machine of the same variant. What was not run, and machine and versions, make no difference.
    """
    machines: dict[tuple[str, str], set[str]] = {}
    for line in committed:
        if line.passed:
            machines.setdefault((line.test, line.platform), set()).add(line.machine)
    faults_found: list[str] = []
    notes_found: list[str] = []
    for now in fresh:
        proved_on = machines.get((now.test, now.platform))
        if now.passed or proved_on is None:
            continue
        is_fault = not now.skipped or now.reason.startswith(EXPECTED) or (strict and now.machine in proved_on)
        what = f"was skipped ({now.reason})" if now.skipped else now.outcome
        where = f"{now.test} on {now.platform}:{now.machine}"
        (faults_found if is_fault else notes_found).append(f"{where} {what}, but has evidence that it passed")
    return faults_found, notes_found


def _or_empty(text: str) -> str:
    return text or "empty"
