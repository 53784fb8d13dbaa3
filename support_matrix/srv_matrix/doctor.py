"""What `srv doctor` says of a device's evidence, in a checkout. Added through the group `srv.doctor`."""

from __future__ import annotations

from pathlib import Path

from srv.platform.finding import Finding
from srv_matrix.ages import age_notes, ages_of
from srv_matrix.evidence import read_folder
from srv_matrix.repository import find_repository

NAME = "evidence"


def findings(platform: str, variant: str) -> list[Finding]:
    """How long ago the evidence on this variant ran; nothing outside a checkout, or of a platform that it lacks."""
    repository = find_repository(Path(__file__).resolve())
    if repository is None or not (repository.root / "platforms" / platform).is_dir():
        return []
    lines = [line for line in read_folder(repository.evidence) if (line.platform, line.variant) == (platform, variant)]
    if not lines:
        return [Finding(NAME, "ok", f"nothing in the support matrix was run on {platform}:{variant}")]
    unknown = f"{len(lines)} lines on {platform}:{variant}, of commits that this clone does not have"
    return [Finding(NAME, "ok", note) for note in age_notes(lines, ages_of(lines, repository)) or [unknown]]
