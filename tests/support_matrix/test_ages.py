"""The age of evidence: which code a run covers, and whether it has changed since the tested commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix_world import evidence, git, matrix

from srv_matrix.ages import changed_since, covered_code, is_older, older_evidence
from srv_matrix.repository import Repository

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


def test_evidence_is_older_if_the_code_that_it_covers_has_changed(repository: Repository) -> None:
    commit = repository.head()
    lines = [evidence("schedule_policy=lpm", commit=commit), evidence("host", commit="beef", test="lost")]
    record = matrix(evidence=lines).cell("schedule_policy=lpm", "imagined", "mk1")
    assert record is not None
    for name, files in (("docs/page.md", 0), (OTHER, 0), (OWN, 1), ("core/srv/args.py", 2)):
        (repository.root / name).write_text("two")
        changed = changed_since(lines, repository)
        assert changed == {"imagined": {commit: files}}  # a commit that is not here has no age
        assert is_older(record, changed) is (files > 0)
    assert older_evidence(lines, changed) == [
        "1 lines of evidence on imagined:mk1 are older than the code: 2 files that they cover have changed since "
        f"{commit[:12]} (record them again)"
    ]
    for name in (OWN, "core/srv/args.py"):
        (repository.root / name).write_text("one")
    assert not is_older(record, changed_since(lines, repository))


def test_an_argument_is_older_if_one_of_its_weakest_values_is(repository: Repository) -> None:
    old = repository.head()
    (repository.root / OWN).write_text("two")
    git(repository.root, "commit", "-q", "-a", "-m", "two")
    new = repository.head()
    for commits, older in (((new, new), False), ((old, new), True), ((new, old), True)):
        pairs = zip(("fcfs", "lpm"), commits, strict=True)
        lines = [evidence(f"schedule_policy={value}", commit=commit) for value, commit in pairs]
        record = matrix(evidence=lines).cell("schedule_policy", "imagined", "mk1")
        assert record is not None
        assert record.verified
        assert is_older(record, changed_since(lines, repository)) is older


def test_a_package_that_several_platforms_share_is_covered(repository: Repository) -> None:
    assert covered_code("imagined", repository)[-1] == "platforms/imagined"
    (repository.root / OWN).write_text("from srv_other.facts import FACTS\nfrom srv_kernels import oracles\n")
    assert covered_code("imagined", repository)[-2:] == ("platforms/imagined", "platforms/other")
