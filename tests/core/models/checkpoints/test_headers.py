"""Headers of safetensors files: read once per plan or load, and never kept beyond a change of a file."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from models_small import built, small_model
from safetensors.torch import save_file

from srv.models.checkpoints import safetensors_header
from srv.models.checkpoints.safetensors_header import INDEX, forget_headers, read_checkpoint
from srv.models.read import read_facts
from srv.planning.plan import make_plan
from srv.testing.engine import user_input

HOUR = 3600


def settle(folder: Path, age_s: int = HOUR) -> None:
    """Set the time of the last change of all files to the past."""
    then = time.time() - age_s
    for path in folder.iterdir():
        os.utime(path, (then, then))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file has been read since."""
    found: Counter[str] = Counter()
    read = safetensors_header.read_safetensors

    def counted(path: Path) -> dict[str, safetensors_header.StoredTensor]:
        found[path.name] += 1
        return read(path)

    forget_headers()
    monkeypatch.setattr(safetensors_header, "read_safetensors", counted)
    return found


def test_a_plan_and_a_load_read_each_header_once(reads: Counter[str], tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    settle(tmp_path)
    shards = {path.name: 1 for path in tmp_path.glob("*.safetensors")}
    assert len(shards) > 2
    assert make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)])).refusals == ()
    assert reads == shards
    forget_headers()
    reads.clear()
    facts = read_facts(tmp_path)
    assert reads == shards
    assert built(Path(facts.path)) is not None
    assert reads == shards, "what was read before is used"
    read_checkpoint(tmp_path)
    assert reads == dict.fromkeys(shards, 2), "a load keeps nothing"


def test_a_changed_file_is_read_again(reads: Counter[str], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for age, shape in ((HOUR, 2), (HOUR // 2, 3)):
        save_file({"a": torch.zeros(shape)}, path)
        settle(tmp_path, age)
        for _ in range(2):
            checkpoint = read_checkpoint(tmp_path)
            assert checkpoint is not None
            assert checkpoint.tensors["a"].shape == (shape,)
    assert reads == {path.name: 2}
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}')
    settle(tmp_path, HOUR // 2)
    read_checkpoint(tmp_path)
    assert reads == {path.name: 3}, "the index belongs to the checkpoint"


def test_a_file_that_has_just_been_written_is_always_read(reads: Counter[str], tmp_path: Path) -> None:
    """A second change might not show in its times."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    for _ in range(2):
        read_checkpoint(tmp_path)
    assert reads == {"model.safetensors": 2}
