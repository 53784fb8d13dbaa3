"""The age of evidence: which code a run covers, and how much of it has changed since the tested commit."""

from __future__ import annotations

import pkgutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from matrix_world import evidence, git, matrix

from srv.cli.families import DOCTOR_GROUP
from srv_matrix import ages, doctor
from srv_matrix.ages import Age, age_notes, age_of, ages_of, covered_code
from srv_matrix.evidence import write_file
from srv_matrix.repository import Repository

ROOT = Path(__file__).resolve().parents[2]
OWN, OTHER = "platforms/imagined/srv_imagined/facts.py", "platforms/other/srv_other/facts.py"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    git(tmp_path, "init", "-q")
    for name in (OWN, OTHER, "core/srv/args.py", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return Repository(tmp_path)


def test_the_age_of_evidence_is_what_changed_in_the_code_that_it_covers(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ages, "OLD_LINES", 3)
    commit = repository.head()
    lines = [evidence("schedule_policy=lpm", commit=commit), evidence("host", commit="beef", test="lost")]
    record = matrix(evidence=lines).cell("schedule_policy=lpm", "imagined", "mk1")
    assert record is not None
    steps = (("docs/page.md", Age(0, 0)), (OTHER, Age(0, 0)), (OWN, Age(0, 2)), ("core/srv/args.py", Age(0, 4)))
    for name, age in steps:
        (repository.root / name).write_text("two")
        by_commit = ages_of(lines, repository)
        assert by_commit == {("imagined", commit): age}  # a commit that is not here has no age
        assert age_of(record, by_commit) == age
    git(repository.root, "commit", "-q", "-a", "-m", "two")
    by_commit = ages_of(lines, repository)
    assert age_notes(lines, by_commit) == [
        "1 line of evidence on imagined:mk1 ran 1 commit and 4 changed lines ago; 1 of them old "
        "(on such a device: make evidence PLATFORM=imagined:mk1)"
    ]
    for name in (OWN, "core/srv/args.py"):
        (repository.root / name).write_text("one")
    assert ages_of(lines, repository) == {("imagined", commit): Age(1, 0)}  # no line differs, so it is not old
    assert not Age(1, 0).is_old


def test_a_cell_is_as_old_as_its_newest_evidence_and_an_argument_as_the_oldest_of_its_weakest_values() -> None:
    old, new = Age(2, 20), Age(1, 10)
    by_commit = {("imagined", "0ld"): old, ("imagined", "e3"): new}
    for commits, expected in ((("e3", "e3"), new), (("0ld", "e3"), old), (("e3", "0ld"), old)):
        pairs = zip(("fcfs", "lpm"), commits, strict=True)
        lines = [evidence(f"schedule_policy={value}", commit=commit) for value, commit in pairs]
        record = matrix(evidence=lines).cell("schedule_policy", "imagined", "mk1")
        assert record is not None
        assert record.verified
        assert age_of(record, by_commit) == expected
    twice = [evidence("schedule_policy=lpm", commit=commit, test=commit) for commit in ("0ld", "e3")]
    cell = matrix(evidence=twice).cell("schedule_policy=lpm", "imagined", "mk1")
    assert cell is not None
    assert (age_of(cell, by_commit), age_of(cell, {})) == (new, None)


def test_the_doctor_says_how_old_the_evidence_of_a_device_is(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_repository", lambda start: repository)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert pkgutil.resolve_name(project["entry-points"][DOCTOR_GROUP]["matrix"]) is doctor.findings

    def said() -> list[str]:
        return [finding.detail for finding in doctor.findings("imagined", "mk1")]

    assert said() == ["nothing in the support matrix was run on imagined:mk1"]
    line = evidence("host", commit=repository.head())
    write_file(repository.evidence / "one.jsonl", [line, evidence("host", variant="mk2", test="of another")])
    (repository.root / OWN).write_text("two")
    assert said() == ["1 line of evidence on imagined:mk1 ran 0 commits and 2 changed lines ago"]
    write_file(repository.evidence / "one.jsonl", [replace(line, commit="beef")])
    assert said() == ["1 lines on imagined:mk1, of commits that this clone does not have"]
    assert doctor.findings("foreign", "mk1") == []
    monkeypatch.setattr(doctor, "find_repository", lambda start: None)
    assert said() == []


def test_a_package_that_several_platforms_share_is_covered(repository: Repository) -> None:
    assert covered_code("imagined", repository)[-1] == "platforms/imagined/srv_imagined"
    (repository.root / OWN).write_text("from srv_other.facts import FACTS\nfrom srv_kernels import oracles\n")
    assert covered_code("imagined", repository)[-1] == "platforms/other/srv_other"
