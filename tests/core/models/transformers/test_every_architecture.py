"""Every causal architecture of transformers: the committed record of what becomes of it, and how it is made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import transformers
from architectures_swept import sweep
from architectures_tiny import model_class, model_types
from sizes_published import CONFIGS

from srv.models import derive
from srv.models.blueprint import Part, Recurrent
from srv.models.families.registry import built_in_native_names
from srv.models.families.trees import native_tree_or_reason
from srv_matrix.architectures import RECURRENT, ArchitectureRow, ArchitectureTable, read_table

SHARE = 0.95  # of all classes that declare backends, those excluded by a limit among them
RECORD = Path(__file__).parents[4] / "support_matrix" / "architectures.jsonl"


@pytest.fixture(scope="module")
def record() -> ArchitectureTable:
    found = read_table(RECORD)
    assert found is not None
    return found


def test_the_record_has_every_model_type_of_this_release(record: ArchitectureTable) -> None:
    assert record.transformers == transformers.__version__
    assert sorted(row.model_type for row in record.rows) == sorted(model_types())
    for row in record.rows:
        made = model_class(row.model_type)
        assert (row.architecture, row.declares) == (made.__name__, bool(made._supports_attention_backend))
    assert [
        row.model_type for row in record.rows if row.architecture in built_in_native_names() and row.path == "generic"
    ] == []


def test_classes_that_declare_backends_are_served(record: ArchitectureTable) -> None:
    """At least 95 % of them, and each that has native layers."""
    missing = {row.architecture for row in record.rows if row.outcome != "equal"}
    assert missing.isdisjoint(built_in_native_names())
    equal, every = record.served(declared=True)
    assert every > 90
    assert equal >= SHARE * every, [row.model_type for row in record.rows if row.declares and row.outcome != "equal"]


def test_every_class_that_is_not_served_is_refused_for_a_listed_limit(record: ArchitectureTable) -> None:
    others = {row.model_type: (row.outcome, row.limit) for row in record.rows if row.outcome != "equal"}
    assert {kind: found for kind, found in others.items() if found[0] != "refused" or found[1] is None} == {}


def test_planned_parameters_are_those_of_the_models(record: ArchitectureTable) -> None:
    wrong = {
        row.model_type: (row.planned, row.parameters)
        for row in record.rows
        if row.planned is not None and row.planned != row.parameters
    }
    assert wrong == {}
    assert sum(row.planned is not None for row in record.rows) > 70


def test_recurrent_layers_are_named_beside_attention(record: ArchitectureTable) -> None:
    native = {row.architecture: dict[str, Any]() for row in record.rows if row.architecture in built_in_native_names()}
    configs = native | {name: fields for name, fields in CONFIGS.values() if name in native}
    made = {name: native_tree_or_reason(name, fields) for name, fields in configs.items()}
    trees = {name: tree for name, tree in made.items() if isinstance(tree, Part)}
    hybrids = {name for name, tree in trees.items() if derive.find(tree, Recurrent) is not None}
    recorded = {row.architecture for row in record.rows if RECURRENT in row.traits}
    assert recorded == hybrids | {"Lfm2MoeForCausalLM"}  # by default, all layers of this one attend
    assert all(len(row.traits) > 1 for row in record.rows if RECURRENT in row.traits)


def test_a_crash_is_one_row() -> None:
    def crash(kind: str, folder: Path) -> ArchitectureRow:
        if kind == "llama":
            os._exit(7)
        return ArchitectureRow(model_type=kind, architecture=folder.name, declares=True, outcome="equal")

    rows = {row.model_type: row for row in sweep(["llama", "gpt2"], row=crash)}
    assert (rows["llama"].outcome, rows["llama"].reason) == ("failed", "its process ended with status 7")
    assert rows["gpt2"].outcome == "equal"


@pytest.mark.proof(minutes=4)
def test_every_architecture_does_what_the_record_says(record: ArchitectureTable) -> None:
    found = {row.model_type: _without_words(row) for row in sweep(model_types())}
    expected = {row.model_type: _without_words(row) for row in record.rows}
    differing = [name for name in expected if found.get(name) != expected[name]]
    assert not differing, f"run `make architectures`: {[(found.get(each), expected[each]) for each in differing]}"


def _without_words(row: ArchitectureRow) -> tuple[object, ...]:
    """What does not depend on the backends of a machine: reasons name them."""
    return row.outcome, row.path, row.traits, row.limit, row.parameters, row.planned
