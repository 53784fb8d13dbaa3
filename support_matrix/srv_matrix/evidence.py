"""Evidence: lines of JSON in `support_matrix/evidence/`, one test that ran each; read, written, judged, compared.

Evidence is refused unless its test exists, covers the cells that it names, and the commit tested is an ancestor of
HEAD. Nothing here runs a test.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from srv_matrix.records import Evidence, Key, Level
from srv_matrix.repository import MatrixError, Repository

OUTCOMES = ("passed", "failed")
PLUGIN = "srv_matrix.pytest_plugin"
_TEXTS = tuple(field.name for field in fields(Evidence) if field.name not in ("covers", "level"))
_COLLECT_TIMEOUT_S = 300


def to_line(evidence: Evidence) -> str:
    """One line of a `.jsonl` file."""
    return json.dumps(asdict(evidence) | {"level": evidence.level.name}, ensure_ascii=False)


def from_line(line: str) -> Evidence:
    """What `to_line` wrote; ValueError says what is wrong with anything else."""
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError("is no JSON object")
    if unknown := raw.keys() - {field.name for field in fields(Evidence)}:
        raise ValueError(f"has the unknown fields {', '.join(sorted(unknown))}")
    return _checked(raw)


def _checked(raw: Mapping[str, Any]) -> Evidence:
    texts = {name: raw.get(name, "") for name in _TEXTS}
    for name, text in texts.items():
        if not isinstance(text, str) or not (text or name in ("note", "driver")):
            raise ValueError(f"has no {name}")
    covers = raw.get("covers")
    if not isinstance(covers, list) or not covers or not all(isinstance(cell, str) for cell in covers):
        raise ValueError("covers nothing")
    if raw.get("level") not in Level.__members__:
        raise ValueError(f"has the level {raw.get('level')!r}; levels are {', '.join(Level.__members__)}")
    if texts["outcome"] not in OUTCOMES:
        raise ValueError(f"has the outcome {texts['outcome']!r}; outcomes are {', '.join(OUTCOMES)}")
    datetime.date.fromisoformat(texts["date"])
    return Evidence(covers=tuple(covers), level=Level[raw["level"]], **texts)


def read_file(path: Path) -> tuple[Evidence, ...]:
    """The evidence of one file; MatrixError names file and line of what is no evidence."""
    found: list[Evidence] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(from_line(line))
        except ValueError as error:
            raise MatrixError(f"{path.name} line {number}: {error}") from error
    return tuple(found)


def read_folder(folder: Path) -> tuple[Evidence, ...]:
    """All evidence of a folder, files in order of their names."""
    return tuple(each for path in sorted(folder.glob("*.jsonl")) for each in read_file(path))


def write_file(path: Path, evidence: Iterable[Evidence]) -> None:
    """Write one file, sorted by platform, variant and test, so that it changes only where evidence does."""
    ordered = sorted(evidence, key=lambda each: (each.platform, each.variant, each.test, each.covers))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(to_line(each) + "\n" for each in ordered), encoding="utf-8")


def collect_marks(repository: Repository, files: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The `covers` marks of the tests in these files, by test id, as pytest itself collects them.

    Each is {"covers": [...], "level": "E4"}. MatrixError if a file cannot be collected.
    """
    present = [file for file in dict.fromkeys(files) if (repository.root / file).is_file()]
    if not present:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "marks.json"
        options = ["--collect-only", "-q", "-p", PLUGIN, f"--srv-covers={out}"]
        command = [sys.executable, "-m", "pytest", *options, *present]
        done = subprocess.run(
            command, cwd=repository.root, capture_output=True, text=True, timeout=_COLLECT_TIMEOUT_S, check=False
        )
        if done.returncode != 0 or not out.exists():
            raise MatrixError(f"pytest cannot collect {', '.join(present)}: {(done.stdout + done.stderr)[-2000:]}")
        marks: dict[str, dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return marks


def faults(
    evidence: Sequence[Evidence],
    cells: Iterable[Key],
    marks: Mapping[str, Mapping[str, Any]],
    is_ancestor: Callable[[str], bool],
) -> list[str]:
    """Everything that speaks against the evidence, a sentence each. `marks` come from `collect_marks`."""
    known = set(cells)
    commits = {commit: is_ancestor(commit) for commit in dict.fromkeys(each.commit for each in evidence)}
    found: list[str] = []
    for each in evidence:
        found += [f"evidence of {each.test}: {fault}" for fault in _faults_of(each, known, marks, commits)]
    return found


def _faults_of(
    evidence: Evidence, known: set[Key], marks: Mapping[str, Mapping[str, Any]], commits: Mapping[str, bool]
) -> list[str]:
    found: list[str] = []
    mark = marks.get(evidence.test)
    if mark is None:
        found.append("there is no such test, or it is marked to cover nothing")
    else:
        missing = sorted(set(evidence.covers) - set(mark["covers"]))
        found += [f"the test does not cover {cell}" for cell in missing]
        if evidence.level > Level[mark["level"]]:
            found.append(f"the evidence says {evidence.level.name}, the test's mark {mark['level']}")
    for cell in evidence.covers:
        if (cell, evidence.platform, evidence.variant) not in known:
            found.append(f"there is no cell {cell} of {evidence.platform}:{evidence.variant}")
    if not commits[evidence.commit]:
        found.append(f"commit {evidence.commit} is no ancestor of HEAD (in a shallow clone, fetch the history)")
    if not evidence.passed:
        found.append(f"its outcome is {evidence.outcome}: declare the cell for what it is, or mend it")
    return found


def compare(committed: Sequence[Evidence], fresh: Sequence[Evidence]) -> list[str]:
    """What a fresh run shows otherwise than the committed evidence of the same platforms and variants.

    Commit, date, device name and versions may differ; what a test covers, its level and its outcome may not.
    """
    places = {(each.platform, each.variant) for each in fresh}
    old = {_identity(each): each for each in committed if (each.platform, each.variant) in places}
    new = {_identity(each): each for each in fresh}
    found = [f"{_told(key)} is committed, and did not run again" for key in sorted(old.keys() - new.keys())]
    found += [f"{_told(key)} ran, and is not committed" for key in sorted(new.keys() - old.keys())]
    for key in sorted(old.keys() & new.keys()):
        before, now = old[key], new[key]
        for name in ("outcome", "level", "covers", "note"):
            if getattr(before, name) != getattr(now, name):
                found.append(f"{_told(key)}: {name} was {getattr(before, name)}, and is {getattr(now, name)}")
    return found


def _identity(evidence: Evidence) -> Key:
    return evidence.test, evidence.platform, evidence.variant


def _told(key: Key) -> str:
    return f"{key[0]} on {key[1]}:{key[2]}"
