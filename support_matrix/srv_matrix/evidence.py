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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from srv_matrix.records import CHANGED, Evidence, Key, Level
from srv_matrix.repository import MatrixError, Repository

OUTCOMES = ("passed", "failed")
VOLATILE = ("commit", "plugin_version", "driver", "device", "date")  # may differ from one run to the next
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
    is_ancestor: Callable[[str], bool | None],
) -> list[str]:
    """Everything that speaks against the evidence, a sentence each. `marks` come from `collect_marks`.

    `is_ancestor` gives None for a commit of which this checkout cannot tell; that is no fault of the evidence.
    """
    known = set(cells)
    tests = Counter((each.test, each.platform, each.variant) for each in evidence)
    twice = [f"evidence of {key[0]}: it is there twice for {key[1]}:{key[2]}" for key, n in tests.items() if n > 1]
    commits = {commit: is_ancestor(commit) for commit in dict.fromkeys(each.commit for each in evidence)}
    found = twice
    for each in evidence:
        found += [f"evidence of {each.test}: {fault}" for fault in _faults_of(each, known, marks, commits)]
    return found


def prune(
    folder: Path,
    cells: Iterable[Key],
    marks: Mapping[str, Mapping[str, Any]],
    is_ancestor: Callable[[str], bool | None],
) -> int:
    """Take every line that something speaks against out of the files of a folder; how many there were."""
    known, gone = set(cells), 0
    for path in sorted(folder.glob("*.jsonl")):
        lines = read_file(path)
        kept = [each for each in lines if not faults([each], known, marks, is_ancestor)]
        gone += len(lines) - len(kept)
        if not kept:
            path.unlink()
        elif len(kept) < len(lines):
            write_file(path, kept)
    return gone


def _faults_of(
    evidence: Evidence, known: set[Key], marks: Mapping[str, Mapping[str, Any]], commits: Mapping[str, bool | None]
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
        if (forced := mark.get("variant")) and forced != evidence.variant:
            found.append(f"the evidence is of {evidence.variant}, and the test forces {forced}")
    for cell in evidence.covers:
        if (cell, evidence.platform, evidence.variant) not in known:
            told = f"there is no cell {cell} of {evidence.platform}:{evidence.variant} that a test could show"
            found.append(told + ("" if "=" in cell else "; of an argument whose values are cells, name one of them"))
    if evidence.commit.endswith(CHANGED):
        found.append(f"its tree was not that of a commit ({evidence.commit}): commit, and record it again")
    elif commits[evidence.commit] is False:
        found.append(f"commit {evidence.commit} is no ancestor of HEAD")
    if not evidence.passed:
        found.append(f"its outcome is {evidence.outcome}: declare the cell for what it is, or mend it")
    return found


def compare(committed: Sequence[Evidence], fresh: Sequence[Evidence]) -> list[str]:
    """What a fresh run does not bear out of the committed evidence of its platforms, a sentence each.

    A machine is of one variant. What is committed of that one must have run again and shown the same, but for
    `VOLATILE`; where nothing is, the platform's other variants are taken, since the same tests must pass here.
    What the fresh run shows beyond that is no fault: see `uncommitted`.
    """
    if not fresh:
        return ["the fresh run holds no evidence: no marked test ran"]
    found: list[str] = []
    for platform, variant in dict.fromkeys((each.platform, each.variant) for each in fresh):
        old = _committed_for(committed, platform, variant)
        new = {each.test: each for each in fresh if (each.platform, each.variant) == (platform, variant)}
        for before in old:
            where = f"{before.test} on {platform}:{variant}"
            if before.test in new:
                found += [f"{where}: {fault}" for fault in _lost(before, new[before.test])]
            else:
                found.append(f"{where} is committed, and did not run again")
    return found


def _committed_for(committed: Sequence[Evidence], platform: str, variant: str) -> list[Evidence]:
    """What is committed of a variant; of all variants of its platform, each test once, if nothing is."""
    own = [each for each in committed if (each.platform, each.variant) == (platform, variant)]
    others = {each.test: each for each in committed if each.platform == platform}
    return own or list(others.values())


def _lost(before: Evidence, now: Evidence) -> list[str]:
    """What a test showed once, and shows no more."""
    found = [
        f"{name} was {_word(old)}, and is {_word(new)}"
        for name in ("outcome", "note")
        if (old := getattr(before, name)) != (new := getattr(now, name))
    ]
    if now.level < before.level:
        found.append(f"level was {before.level.name}, and is {now.level.name}")
    gone = [cell for cell in before.covers if cell not in now.covers]
    return found + [f"it covers {cell} no more" for cell in gone]


def _word(text: str) -> str:
    return text or "empty"


def uncommitted(committed: Sequence[Evidence], fresh: Sequence[Evidence]) -> list[str]:
    """Cells that a fresh run shows and the committed evidence does not, as "cell on platform:variant"."""
    known = {(cell, each.platform, each.variant) for each in committed if each.passed for cell in each.covers}
    shown = {(cell, each.platform, each.variant) for each in fresh if each.passed for cell in each.covers}
    return [f"{cell} on {platform}:{variant}" for cell, platform, variant in sorted(shown - known)]
