"""How old evidence is: the code that a run on a platform covers may have changed since the commit that was tested.

Files are compared by content, with the working tree: a change that was taken back makes nothing older. The committed
pages have no ages, because every commit would change them; `srv matrix check`, `show` and the site have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from srv_matrix.records import CHANGED, Evidence, Record
from srv_matrix.repository import Repository

_COMMON = ("core/srv", "kernels/srv_kernels")  # what every platform runs besides its own package
_IMPORT = re.compile(r"^(?:from|import) srv_(\w+)", re.MULTILINE)

ChangedSince = Mapping[str, Mapping[str, int]]


def changed_since(evidence: Iterable[Evidence], repository: Repository) -> ChangedSince:
    """For each platform and commit of the evidence: how many files of the code that it covers have changed since.

    Commits that this clone does not have are left out: the age of their evidence is unknown.
    """
    found: dict[str, dict[str, int]] = {}
    pairs = dict.fromkeys((each.platform, each.commit) for each in evidence if not each.commit.endswith(CHANGED))
    for platform, commit in pairs:
        files = repository.changed_since(commit, covered_code(platform, repository))
        if files is not None:
            found.setdefault(platform, {})[commit] = files
    return found


def covered_code(platform: str, repository: Repository) -> tuple[str, ...]:
    """The folders of the code that a run on a platform covers, relative to the root; with platforms that it imports."""
    own = repository.root / "platforms" / platform / f"srv_{platform}"
    imported = {name for file in own.rglob("*.py") for name in _IMPORT.findall(file.read_text(encoding="utf-8"))}
    others = sorted(f"platforms/{name}" for name in imported - {platform})
    return (*_COMMON, f"platforms/{platform}", *(each for each in others if (repository.root / each).is_dir()))


def is_older(record: Record, changed: ChangedSince) -> bool:
    """Whether all evidence on which the cell's level is based was recorded before its code last changed.

    A level that follows from those of values is older if that of one of the weakest is.
    """
    if record.values:
        return any(is_older(each, changed) for each in record.weakest)
    files = [changed.get(each.platform, {}).get(each.commit, 0) for each in record.ran]
    return bool(files) and all(files)


def older_evidence(evidence: Iterable[Evidence], changed: ChangedSince) -> list[str]:
    """A note for each variant and commit with evidence that is older than its code."""
    counted: dict[tuple[str, str, str], int] = {}
    for each in evidence:
        if changed.get(each.platform, {}).get(each.commit):
            key = (each.platform, each.variant, each.commit)
            counted[key] = counted.get(key, 0) + 1
    return [
        f"{lines} lines of evidence on {platform}:{variant} are older than the code: {changed[platform][commit]} files "
        f"that they cover have changed since {commit[:12]} (record them again)"
        for (platform, variant, commit), lines in counted.items()
    ]
