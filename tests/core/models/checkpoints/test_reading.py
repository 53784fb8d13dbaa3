"""Weight files that are read instead of mapped, and by several threads: the same weights, and the same refusals."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes_weights import Form as NF4Form
from bitsandbytes_weights import write as write_nf4
from every import every
from fp8_weights import FORMS, write_fp8
from gguf import GGMLQuantizationType as Kind
from models_small import built, edit_config, small_model, write_gguf
from mxfp4_weights import write_compressed
from packed_weights import AWQ, write_packed
from safetensors.torch import save_file

from srv.dist.group import RankGroup
from srv.errors import ModelError
from srv.models.base import NativeModel
from srv.models.checkpoints.deletion import delete_weights
from srv.models.checkpoints.reading import FileBytes, Reading, for_each
from srv.models.checkpoints.safetensors_header import read_checkpoint
from srv.models.checkpoints.safetensors_loader import load_safetensors
from srv.models.checkpoints.storage import StorageFormat

READINGS = (Reading(mapped=False), Reading(threads=4), Reading(mapped=False, threads=4))


class Calls:
    """What a progress bar gets: the total, and the bytes that are done after each tensor."""

    def __init__(self) -> None:
        self.total, self.done = 0, list[int]()

    def __call__(self, total: int, done: int, name: str) -> None:
        self.total = total
        self.done.append(done)


def loaded(path: Path, **more: Any) -> dict[str, torch.Tensor]:
    model = built(path, **more)
    assert isinstance(model, NativeModel)
    return model.weight_views()


def check(path: Path, **more: Any) -> None:
    before = loaded(path, **more)
    for reading in READINGS:
        calls = Calls()
        after = loaded(path, **more, reading=reading, progress=calls)
        assert all(torch.equal(after[name], value) for name, value in before.items()), reading
        assert calls.done == sorted(calls.done)
        assert calls.done[-1] == calls.total


def test_sharded_and_single_files(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    small_model("qwen3_moe", dtype="bfloat16").save_pretrained(tmp_path / "single")
    check(tmp_path / "shards")
    check(tmp_path / "single")


def test_tensors_that_become_one_by_conversion(tmp_path: Path) -> None:
    """Each layer is made of several tensors, which several threads read."""
    write_packed(tmp_path / "awq", AWQ)
    check(tmp_path / "awq")
    for name, write in (("mxfp4", write_compressed), ("nf4", lambda folder: write_nf4(folder, NF4Form()))):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        check(tmp_path / name)


class Meeting(StorageFormat):
    """Each conversion waits for another one that is under way."""

    def __init__(self, threads: int) -> None:
        self._barrier = threading.Barrier(threads, timeout=20)

    def convert(self, name: str, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        self._barrier.wait()
        return {name: stored}


def test_threads_convert_at_a_time(tmp_path: Path) -> None:
    weights = {str(number): torch.full((3,), float(number)) for number in range(8)}
    save_file(weights, tmp_path / "model.safetensors")
    views = {name: torch.zeros(3) for name in weights}
    load_safetensors(tmp_path, views, storage=Meeting(2), reading=Reading(threads=2))
    assert all(torch.equal(views[name], weight) for name, weight in weights.items())


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """They have a type of their own, whose name in torch is another one."""
    write_fp8(tmp_path, FORMS["fp8, blocks scaled by powers of two"])
    check(tmp_path)


def test_the_part_of_a_rank(tmp_path: Path) -> None:
    """Rows and columns: only rows are read in part."""
    small_model("llama", vocab_size=96).save_pretrained(tmp_path)
    check(tmp_path, group=RankGroup(rank=1, size=2))


def test_gguf_in_blocks_and_dequantized(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "model.gguf",
        small_model("llama", hidden_size=64, intermediate_size=96, num_attention_heads=4),
        "llama",
        Kind.Q8_0,
    )
    check(tmp_path / "model.gguf")
    check(tmp_path / "model.gguf", dequantize=False)


@every("reading", READINGS)
def test_a_shard_that_ends_early_is_refused(reading: Reading, tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ModelError, match=shard.name) as caught:
        built(tmp_path, reading=reading)
    assert caught.value.code == "truncated"


@every("reading", READINGS)
def test_an_error_of_a_thread_is_that_of_the_loader(reading: Reading, tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, num_hidden_layers=2)
    with pytest.raises(ModelError) as caught:
        built(tmp_path, reading=reading)
    assert caught.value.code == "unexpected_tensors"


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"12345678")
    with FileBytes(path) as data:
        assert data.read(2, 4) == b"3456"
        path.write_bytes(b"1234")
        with pytest.raises(ModelError, match="it ends at byte 4") as caught:
            data.read(2, 4)
    assert caught.value.code == "truncated"


def test_the_first_error_of_several_threads_is_raised_and_nothing_is_begun_after_it() -> None:
    done, released = [], threading.Event()

    def work(item: int) -> None:
        if item == 0:
            raise ValueError("of the first")
        released.wait(0.05)
        done.append(item)

    with pytest.raises(ValueError, match="of the first"):
        for_each(range(1000), work, 2)
    assert len(done) < 999


def test_deleting_weights_keeps_everything_else(tmp_path: Path) -> None:
    """A folder of files, one with a link to another place, a folder likewise, and the cache of a hub library."""
    model = small_model("llama")
    model.save_pretrained(tmp_path / "plain")
    assert [path.name for path in delete_weights(tmp_path / "plain")] == ["model.safetensors"]
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {"config.json", "generation_config.json"}
    assert delete_weights(tmp_path / "plain") == []

    root = tmp_path / "models--org--name"
    snapshot, elsewhere = root / "snapshots" / "abc", tmp_path / "elsewhere"
    model.save_pretrained(snapshot)
    model.save_pretrained(elsewhere)
    (root / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(root / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    delete_weights(snapshot)
    assert not (snapshot / "model.safetensors").is_symlink()
    assert list((root / "blobs").iterdir()) == []

    model.save_pretrained(tmp_path / "links")
    (tmp_path / "links" / "model.safetensors").unlink()
    (tmp_path / "links" / "model.safetensors").symlink_to(elsewhere / "model.safetensors")
    delete_weights(tmp_path / "links")
    assert not (tmp_path / "links" / "model.safetensors").is_symlink()
    assert (elsewhere / "model.safetensors").is_file()

    model.save_pretrained(tmp_path / "folders")
    (tmp_path / "folders" / "model.safetensors").unlink()
    (tmp_path / "folders" / "part").symlink_to(elsewhere)
    names = dict.fromkeys(read_checkpoint(elsewhere).tensors, "part/model.safetensors")
    (tmp_path / "folders" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert delete_weights(tmp_path / "folders") == []
    assert (elsewhere / "model.safetensors").is_file()
