"""How old evidence is: how many commits and lines of the code that a run covers have changed since the tested commit.

That code is core, the kernels, and the packages of the platform. Lines are compared with the working tree: a change
that was taken back makes nothing older. An age is a statement and never a fault, and no committed page has one, because
every commit would change it; `srv matrix check` and `show`, `srv doctor`, JSON and the site have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from srv_matrix.records import CHANGED, Evidence, Record
from srv_matrix.repository import Repository

OLD_LINES = 10_000  # evidence is old once more lines have changed: a tenth of the code that a run covers
_COMMON = ("core/srv", "kernels/srv_kernels")  # what every platform runs besides its own package
_IMPORT = re.compile(r"^\s*(?:from|import) srv_(\w+)", re.MULTILINE)


class Age(NamedTuple):
    """`commits` that changed the code that a run covers, and `lines` added or removed there since it ran."""

    commits: int
    lines: int

    @property
    def is_old(self) -> bool:
        return self.lines > OLD_LINES

    def __str__(self) -> str:
        if not self.commits and not self.lines:
            return "on the present code"
        return f"{_counted(self.commits, 'commit')} and {_counted(self.lines, 'changed line')} ago"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


Ages: TypeAlias = Mapping[tuple[str, str], Age]  # by platform and commit


def ages_of(evidence: Iterable[Evidence], repository: Repository) -> Ages:
    """The age of each platform and commit of the evidence.

    Commits that this clone does not have are left out: the age of their evidence is unknown.
    """
    by_platform: dict[str, dict[str, None]] = {}
    for line in evidence:
        if not line.commit.endswith(CHANGED):
            by_platform.setdefault(line.platform, {})[line.commit] = None
    ages: dict[tuple[str, str], Age] = {}
    for platform, commits in by_platform.items():
        folders = covered_code(platform, repository)
        for commit in commits:
            count, lines = repository.commits_since(commit, folders), repository.lines_since(commit, folders)
            if count is not None and lines is not None:
                ages[platform, commit] = Age(count, lines)
    return ages


def covered_code(platform: str, repository: Repository) -> tuple[str, ...]:
    """The packages that a run on a platform covers, relative to the root; with those of platforms that it imports."""
    own_folder = f"platforms/{platform}/srv_{platform}"
    files = (repository.root / own_folder).rglob("*.py")
    imported = {name for file in files for name in _IMPORT.findall(file.read_text(encoding="utf-8"))}
    others = sorted(f"platforms/{name}/srv_{name}" for name in imported - {platform})
    return (*_COMMON, own_folder, *(other for other in others if (repository.root / other).is_dir()))


def age_of(record: Record, ages: Ages) -> Age | None:
    """The age of the newest evidence on which the cell's level is based; None if nothing ran, or if it is unknown.

    A level that follows from those of values is as old as the oldest of the weakest, and unknown if one of these is.
    """
    if record.values:
        of_values = [age_of(value, ages) for value in record.weakest]
        ages_known = [age for age in of_values if age is not None]
        return max(ages_known) if ages_known and len(ages_known) == len(of_values) else None
    run_ages = (ages.get((line.platform, line.commit)) for line in record.ran)
    return min((age for age in run_ages if age is not None), default=None)


def age_notes(evidence: Iterable[Evidence], ages: Ages) -> list[str]:
    """For each variant with evidence: how long ago its lines ran, and how many of them are old."""
    by_place: dict[str, list[Age]] = {}
    for line in evidence:
        if (age := ages.get((line.platform, line.commit))) is not None:
            by_place.setdefault(f"{line.platform}:{line.variant}", []).append(age)
    return [_note(place, sorted(its)) for place, its in by_place.items()]


def _note(place: str, ages: list[Age]) -> str:
    newest, oldest = ages[0], ages[-1]
    old = sum(age.is_old for age in ages)
    span = str(newest)
    if newest != oldest:
        commits, lines = (f"{one:,} to {other:,}" for one, other in zip(newest, oldest, strict=True))
        span = f"{commits} commits and {lines} changed lines ago"
    note = f"{_counted(len(ages), 'line')} of evidence on {place} ran {span}"
    return note + (f"; {old} of them old (on such a device: make evidence PLATFORM={place})" if old else "")
