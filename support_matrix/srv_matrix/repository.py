"""The paths of the matrix's inputs and pages in a checkout, and git queries about commits."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srv.errors import SrvError

MARKER = Path("support_matrix") / "published" / "index.toml"

_GENERATED = ("support_matrix/evidence/", "support_matrix/inventory.json", "docs/support/")


class MatrixError(SrvError):
    """The support matrix cannot be generated: an input is missing or damaged."""


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file; MatrixError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise MatrixError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Repository:
    """A checkout of the source tree."""

    root: Path

    @property
    def published(self) -> Path:
        return self.root / "support_matrix" / "published"

    @property
    def checkpoints(self) -> Path:
        return self.published / "checkpoints"

    @property
    def evidence(self) -> Path:
        return self.root / "support_matrix" / "evidence"

    @property
    def inventory(self) -> Path:
        return self.root / "support_matrix" / "inventory.json"

    @property
    def architectures(self) -> Path:
        return self.root / "support_matrix" / "architectures.jsonl"

    @property
    def pages(self) -> Path:
        return self.root / "docs" / "support"

    @property
    def kept(self) -> Path:
        """The folder of results that are kept (`srv_matrix.kept`)."""
        return self.root / "build" / "matrix"

    def head(self) -> str:
        """The commit that is checked out."""
        return self._git("rev-parse", "HEAD")

    def is_ancestor(self, commit: str) -> bool | None:
        """Whether a commit is in the history of HEAD. None: unknown, because this clone is shallow.

        A commit that a full clone does not have is not in the history.
        """
        if self._run("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0:
            return True
        return None if self._git("rev-parse", "--is-shallow-repository") == "true" else False

    def commits_since(self, commit: str, folders: Sequence[str]) -> int | None:
        """How many commits after `commit` changed files of these folders; None without that commit."""
        process = self._run("rev-list", "--count", f"{commit}..HEAD", "--", *folders)
        return int(process.stdout) if process.returncode == 0 else None

    def lines_since(self, commit: str, folders: Sequence[str]) -> int | None:
        """How many lines of these folders a commit and the working tree do not share; None without that commit."""
        process = self._run("diff", "--numstat", commit, "--", *folders)
        counts = (number for line in process.stdout.splitlines() for number in line.split("\t")[:2])
        return sum(int(count) for count in counts if count != "-") if process.returncode == 0 else None

    def uncommitted(self) -> tuple[str, ...]:
        """Files that differ from HEAD, apart from generated ones, which do not affect any test."""
        return tuple(file for file in self.changed_files() if not file.startswith(_GENERATED))

    def changed_files(self) -> tuple[str, ...]:
        """Files that differ from HEAD, including untracked ones."""
        lines = self._git("status", "--porcelain", "--untracked-files=all").splitlines()
        return tuple(line[3:] for line in lines)

    def _git(self, *arguments: str) -> str:
        process = self._run(*arguments)
        if process.returncode != 0:
            raise MatrixError(f"git {' '.join(arguments)} failed in {self.root}: {process.stderr.strip()}")
        return process.stdout.rstrip("\n")

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(self.root), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except OSError as error:
            raise MatrixError(f"git cannot be run: {error}. The support matrix needs git and a checkout.") from error


def find_repository(start: Path) -> Repository | None:
    """The checkout that contains `start`; None if there is none."""
    return next((Repository(folder) for folder in (start, *start.parents) if (folder / MARKER).exists()), None)
