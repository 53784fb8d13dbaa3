"""The matrix of this checkout, made once per process, as `make matrix` makes it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from srv_matrix.matrix import Matrix, read_matrix
from srv_matrix.repository import Repository

ROOT = Path(__file__).resolve().parents[2]


@cache
def committed_matrix() -> Matrix:
    return read_matrix(Repository(ROOT))
