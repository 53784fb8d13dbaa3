"""Damaged checkpoints are refused by name, before any weight is read; one that is not refused has the same weights."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from args_world import user
from every import every
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from models_reference_ops import reference_ops
from models_small import HOST, built, small_model, write_gguf
from torch import Tensor

from srv.errors import ModelError, Refusal
from srv.models.base import NativeModel
from srv.models.build import build
from srv.models.checkpoints.deletion import delete_weights
from srv.models.checkpoints.gguf_header import read_header
from srv.models.choice import LayerOptions
from srv.models.layers.context import BuildContext
from srv.models.read import read_facts
from srv.planning.plan import make_plan
from srv.specs import ModelFacts

SMALL = {"num_hidden_layers": 1, "vocab_size": 24}
JSON_BYTES = b'0123456789[]{},:" -.eIFUBab\x00\xff'


def weights(path: Path, facts: ModelFacts) -> dict[str, Tensor]:
    """The loaded weights by name. `facts`: of the whole file, so that only weights can differ."""
    model = build(facts, LayerOptions(model_impl="srv"), BuildContext(HOST, torch.float32, reference_ops()))
    assert isinstance(model, NativeModel)
    return {name: view.clone() for name, view in model.weight_views().items()}


class Whole:
    """A checkpoint without damage: the bytes of its file, its header's length, its facts and its weights."""

    def __init__(self, path: Path, folder: Path, header: int) -> None:
        self.path, self.folder, self.header = path, folder, header
        self.data = path.read_bytes()
        self.facts = read_facts(folder)
        self.weights = weights(folder, self.facts)

    def check(self, damaged: bytes) -> str:
        """Load the file with other bytes: the code of the refusal, or "" if nothing that is loaded differs."""
        loaded = self._load(damaged)
        if isinstance(loaded, ModelError):
            assert self.path.name in loaded.what or str(self.folder) in loaded.what
            assert loaded.reason
            assert loaded.remedy
            return loaded.code
        assert loaded.keys() == self.weights.keys()
        for name, value in loaded.items():
            assert torch.equal(value, self.weights[name]), f"{name} was loaded with other values"
        return ""

    def refusal(self, damaged: bytes) -> ModelError:
        """Why a file with other bytes is refused."""
        loaded = self._load(damaged)
        assert isinstance(loaded, ModelError)
        return loaded

    def _load(self, data: bytes) -> dict[str, Tensor] | ModelError:
        self.path.write_bytes(data)
        try:
            return weights(self.folder, self.facts)
        except ModelError as error:
            return error
        finally:
            self.path.write_bytes(self.data)


@pytest.fixture(scope="module")
def safetensors(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("safetensors")
    small_model("llama", **SMALL).save_pretrained(folder)
    path = folder / "model.safetensors"
    return Whole(path, folder, 8 + int.from_bytes(path.read_bytes()[:8], "little"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, small_model("llama", **SMALL), "llama", Kind.F32)
    first = min(each.offset for each in read_header(path).tensors.values())
    return Whole(path, path, first)


@settings(max_examples=50)
@given(data=st.data())
def test_damage_to_the_header_of_a_safetensors_file(safetensors: Whole, data: st.DataObject) -> None:
    """One range of bytes of the header is overwritten, removed or repeated."""
    begin = data.draw(st.integers(0, safetensors.header - 1))
    end = min(begin + data.draw(st.integers(1, 12)), safetensors.header)
    parts = safetensors.data[:begin], safetensors.data[begin:end], safetensors.data[end:]
    bytes_ = st.lists(st.sampled_from(JSON_BYTES), min_size=end - begin, max_size=end - begin).map(bytes)
    damage: Callable[[], bytes] = data.draw(
        st.sampled_from(
            [lambda: data.draw(bytes_), lambda: b"", lambda: 2 * parts[1], lambda: data.draw(st.binary(max_size=12))]
        )
    )
    safetensors.check(parts[0] + damage() + parts[2])


@settings(max_examples=50)
@given(data=st.data())
def test_damage_to_the_table_of_a_gguf_file(gguf: Whole, data: st.DataObject) -> None:
    """One range of bytes of the header is overwritten; the facts are those of the whole file."""
    begin = data.draw(st.integers(0, gguf.header - 1))
    end = min(begin + data.draw(st.integers(1, 12)), gguf.header)
    damage = data.draw(st.binary(min_size=end - begin, max_size=end - begin))
    gguf.check(gguf.data[:begin] + damage + gguf.data[end:])


@settings(max_examples=50)
@given(data=st.data())
def test_a_file_that_ends_early_is_refused(safetensors: Whole, gguf: Whole, data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from([safetensors, gguf]))
    end = data.draw(st.integers(0, len(whole.data) - 1))
    assert whole.check(whole.data[:end]) in ("truncated", "damaged")


def rewritten(whole: Whole, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with a changed header, and the data as they are."""
    header = json.loads(whole.data[8 : whole.header])
    change(header)
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + whole.data[whole.header :]


NORM, OTHER = "model.norm.weight", "model.layers.0.input_layernorm.weight"


@every(
    ("change", "code", "reason"),
    [
        (lambda header: header[NORM].update(dtype="F31"), "damaged", f"{NORM} cannot be read .*'F31'"),
        (lambda header: header[NORM].update(dtype="F16"), "damaged", "of type F16 and shape .48,. cannot have 192"),
        (lambda header: header[NORM].update(dtype="I32"), "dtype_mismatch", f"{NORM} is stored as int32"),
        (lambda header: header[NORM].update(shape=[12, 4]), "shape_mismatch", r"stored \[12, 4\], expected \[48\]"),
        (lambda header: header[NORM].update(shape=[48.0]), "damaged", "48.0 is not an integer"),
        (lambda header: header[NORM].update(shape=[-48]), "damaged", "the shape .-48"),
        (
            lambda header: header[NORM].update(data_offsets=header[OTHER]["data_offsets"]),
            "damaged",
            f"tensors {OTHER} and {NORM} overlap",
        ),
        (lambda header: header.pop(NORM), "damaged", "belong to no tensor"),
        (lambda header: header.update({"model.renamed": header.pop(NORM)}), "missing_tensors", NORM),
    ],
)
def test_a_header_that_contradicts_its_file_is_refused_by_name(
    safetensors: Whole, change: Callable[[dict[str, Any]], object], code: str, reason: str
) -> None:
    error = safetensors.refusal(rewritten(safetensors, change))
    assert error.code == code
    assert re.search(reason, error.reason)


@every(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_types_of_which_several_share_bytes_are_refused(safetensors: Whole, dtype: str, bits: int) -> None:
    """A valid file, in whose types no layer computes."""
    data = rewritten(safetensors, lambda header: header[NORM].update(dtype=dtype, shape=[192 * 8 // bits]))
    safetensors.path.write_bytes(data)
    try:
        with pytest.raises(ModelError, match=rf"stored as {dtype} \(floats of {bits} bits\)") as caught:
            built(safetensors.folder)
    finally:
        safetensors.path.write_bytes(safetensors.data)
    assert caught.value.code == "unsupported_quantization"


def test_bytes_after_the_last_tensor_are_refused(safetensors: Whole) -> None:
    assert safetensors.check(safetensors.data + b"\0" * 64) == "damaged"


def test_a_tensor_that_occurs_twice_in_one_file_is_refused(safetensors: Whole) -> None:
    header = safetensors.data[8 : safetensors.header]
    entry = json.dumps({NORM: json.loads(header)[NORM]}).encode()[1:-1]
    raw = header.rstrip()[:-1] + b"," + entry + b"}"
    error = safetensors.refusal(struct.pack("<Q", len(raw)) + raw + safetensors.data[safetensors.header :])
    assert error.code == "damaged"
    assert f"'{NORM}' occurs twice" in error.reason


def test_a_header_longer_than_its_file_is_refused(safetensors: Whole) -> None:
    for length in (len(safetensors.data), 2**62, 2**64 - 1):
        assert safetensors.check(struct.pack("<Q", length) + safetensors.data[8:]) in ("truncated", "damaged")


def shards(folder: Path) -> dict[str, str]:
    small_model("llama", **SMALL).save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files: dict[str, str] = index["weight_map"]
    assert len(set(files.values())) > 2
    return files


def test_an_index_that_names_a_tensor_that_no_file_has(tmp_path: Path) -> None:
    files = shards(tmp_path)
    named = {"weight_map": {**files, "model.layers.0.extra": files[NORM]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(named))
    with pytest.raises(ModelError, match=r"says that it has tensor model\.layers\.0\.extra") as caught:
        built(tmp_path)
    assert caught.value.code == "damaged"
    assert files[NORM] in caught.value.what


@every("file", ["../{0}", "other/../../{0}", "{1}/{0}"])
def test_an_index_that_names_a_file_out_of_its_folder(tmp_path: Path, file: str) -> None:
    """The files are there, so that they would be read, and deleted after loading."""
    folder = tmp_path / "model"
    files = shards(folder)
    (folder / "other").mkdir()
    (folder / files[NORM]).rename(tmp_path / files[NORM])
    named = {name: file.format(each, tmp_path) if each == files[NORM] else each for name, each in files.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    for use in (built, read_facts, delete_weights):
        with pytest.raises(ModelError, match=re.escape(f"names {named[NORM]!r} as the file of tensor")) as caught:
            use(folder)
        assert caught.value.code == "damaged"
        assert "model.safetensors.index.json" in caught.value.what
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(set(files.values()))


@every("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    """The memory of this process is a file whose first byte nobody can read."""
    small_model("llama", **SMALL).save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/proc/self/mem")
    plan = {"device": "cpu", "model_path": str(tmp_path), "skip_tokenizer_init": True}
    with pytest.raises(Refusal) as caught:
        make_plan(user(**plan))
    (refused,) = caught.value.rejections
    assert (refused.code, refused.what, refused.who) == ("not_found", "model_path", "command line")
    assert f"{name}: it cannot be read (Input/output error)" in refused.reason


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    files = shards(tmp_path)
    first, second = sorted(set(files.values()))[:2]
    (tmp_path / second).write_bytes((tmp_path / first).read_bytes())
    with pytest.raises(ModelError, match="is also in another file") as caught:
        built(tmp_path)
    assert caught.value.code == "damaged"


def test_weight_files_may_be_links_out_of_the_folder(tmp_path: Path) -> None:
    """As in the hub's cache, where all files of a model are."""
    elsewhere, folder = tmp_path / "blobs", tmp_path / "model"
    files = shards(folder)
    elsewhere.mkdir()
    before = weights(folder, read_facts(folder))
    for name in set(files.values()):
        (folder / name).rename(elsewhere / name)
        (folder / name).symlink_to(elsewhere / name)
    after = weights(folder, read_facts(folder))
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_tensors_of_a_gguf_file_that_overlap_are_refused(gguf: Whole) -> None:
    at = gguf.data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8 + 4
    offset = int.from_bytes(gguf.data[at : at + 8], "little")
    assert offset == read_header(gguf.path).tensors["output_norm.weight"].offset - gguf.header
    for moved, state in ((offset - 32, "overlaps the one before it"), (offset + 32, "does not follow")):
        error = gguf.refusal(gguf.data[:at] + struct.pack("<Q", moved) + gguf.data[at + 8 :])
        assert error.code == "damaged"
        assert state in error.reason
