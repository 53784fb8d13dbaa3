"""The recorded table of architectures: its faults, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from srv_matrix.architectures import (
    ArchitectureRow,
    ArchitectureTable,
    architecture_page,
    read_table,
    table_faults,
    write_table,
)
from srv_matrix.repository import MatrixError, Repository

ROWS = (
    ArchitectureRow(model_type="small", architecture="SmallForCausalLM", declares=True, outcome="equal", path="native"),
    ArchitectureRow(
        model_type="wide",
        architecture="WideForCausalLM",
        declares=True,
        outcome="equal",
        path="generic",
        traits=("window",),
    ),
    ArchitectureRow(
        model_type="state",
        architecture="StateForCausalLM",
        declares=False,
        outcome="refused",
        code="unsupported_config",
        reason="FOLDER: StateForCausalLM has no attention: it keeps a recurrent state, which srv does not serve",
    ),
)
TABLE = ArchitectureTable("5.1.0", ROWS)


def checkout(folder: Path, pinned: str) -> Repository:
    (folder / "support_matrix").mkdir()
    (folder / "constraints.txt").write_text(f"torch==2.0\ntransformers=={pinned}\n")
    return Repository(folder)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    repository = checkout(tmp_path, "5.1.0")
    assert read_table(repository.architectures) is None
    write_table(repository.architectures, TABLE)
    read = read_table(repository.architectures)
    assert read is not None
    assert set(read.rows) == set(ROWS)
    assert list(table_faults(read, repository)) == []
    repository.architectures.write_text(repository.architectures.read_text() + "{\n")
    with pytest.raises(MatrixError, match=r"architectures\.jsonl is damaged"):
        read_table(repository.architectures)


def test_faults(tmp_path: Path) -> None:
    unexplained = ArchitectureRow(model_type="odd", architecture="Odd", declares=True, outcome="different")
    unknown = ArchitectureRow(model_type="new", architecture="New", declares=True, outcome="splendid", reason="it is")
    table = ArchitectureTable("5.0.0", (*ROWS, ROWS[0], unexplained, unknown))
    faults = list(table_faults(table, checkout(tmp_path, "5.1.0")))
    assert faults == [
        "architectures.jsonl is of transformers 5.0.0, not 5.1.0: run `make architectures`",
        "architectures.jsonl has 2 rows of small: run `make architectures`",
        "architectures.jsonl has no reason for odd: run `make architectures`",
        "architectures.jsonl has the outcome 'splendid' for new: run `make architectures`",
    ]


def test_a_record_is_missing_only_if_a_release_is_pinned(tmp_path: Path) -> None:
    bare = Repository(tmp_path)
    assert list(table_faults(None, bare)) == []
    assert list(table_faults(TABLE, bare)) == [
        "architectures.jsonl cannot be compared: constraints.txt pins no release of transformers"
    ]
    assert list(table_faults(None, checkout(tmp_path, "5.1.0"))) == [
        "architectures.jsonl is missing: run `make architectures`"
    ]


def test_page() -> None:
    page = architecture_page(TABLE)
    assert "| that declare support of attention backends | 2 | 2 |" in page
    assert "| all | 2 | 3 |" in page
    assert "| `wide` | `WideForCausalLM` | generic | ✅ yes | window |" in page
    assert "| `state` | `StateForCausalLM` | refused | no |  |" in page
    assert "### Recurrent states or convolutions" in page
    assert "- `state`: the model has no attention: it keeps a recurrent state" in page
