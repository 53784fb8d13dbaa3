"""Weights in host memory: which layers a plan moves, and that the layers of each architecture are those it counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepseek_small
import pytest
import torch
from args_world import CONFIG, user
from every import every
from models_small import HOST, built, expected_logits, our_logits, small_model, tokens_of
from offloaded_weights import CASES
from packed_weights import FORMS, write_packed
from torch import Tensor

from srv.args.config import Config
from srv.args.groups.model import ModelArgs
from srv.args.groups.weights import WeightsArgs
from srv.errors import Refusal
from srv.models.base import NativeModel
from srv.models.layers.op_layer import op_layers
from srv.models.read import read_facts
from srv.planning.offload import host_layers
from srv.planning.plan import make_plan
from srv.platform.streams import Event, HostStream, Streams
from srv.worker.offload import HostWeights

GIB = 2**30
KINDS = ("llama", "qwen3", "granite", "gemma3", "qwen3_next", "qwen2_moe", "qwen3_moe", "mixtral")


class Recorded(HostStream):
    """A stream that notes the order of what it is asked."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__()
        self._name, self._notes = name, notes

    def record(self) -> Event:
        self._notes.append(f"{self._name} records")
        return super().record()

    def wait(self, event: Event) -> None:
        self._notes.append(f"{self._name} waits")

    @contextmanager
    def use(self) -> Iterator[None]:  # type: ignore[override]
        self._notes.append(f"{self._name} copies")
        yield


def host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def config(**values: Any) -> Config:
    return Config(model=ModelArgs(dtype="float32"), weights=WeightsArgs(offload_group_size=1, **values))


@every("kind", [*KINDS, "deepseek"])
def test_the_layers_of_an_architecture_are_those_that_a_plan_counts(kind: str, tmp_path: Path) -> None:
    """`move` raises if they are others. The logits are those of transformers, whose weights are all in one place."""
    model = small_model(kind, num_hidden_layers=4) if kind != "deepseek" else deepseek_small.small("v3")
    model.save_pretrained(tmp_path)
    facts, notes = read_facts(tmp_path), list[str]()
    chosen = host_layers(config(), facts)
    assert chosen is not None
    streams = Streams(Recorded("compute", notes), Recorded("in", notes), HostStream())
    host = HostWeights(chosen, host_memory, HOST, streams)
    ours = built(tmp_path, layer_made=host.place)
    assert isinstance(ours, NativeModel)
    host.move()
    assert {layer.offloaded for layer in op_layers(ours, offloaded=True)} == {True, False}
    assert not any(layer.offloaded for layer in op_layers(ours))
    assert host.saved == chosen.saved > 0
    if kind in ("deepseek", "qwen3_next"):  # which need a backend, or a pool of states, to compute
        return
    host.fetch_for_kernels()
    tokens = tokens_of(model)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=5e-4, rtol=1e-3)
    assert notes.count("in copies") > len(chosen.indices)


def test_damaged_quantized_weights_are_refused_as_without_it(tmp_path: Path) -> None:
    """By the plan, which asks the files for the sizes of layers."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.scales"]

    write_packed(tmp_path, FORMS["awq"], spoil, num_hidden_layers=3)
    codes = []
    for values in ({}, {"offload_group_size": 1}):
        made = make_plan(user(model_path=str(tmp_path), device="cuda:sm90", **values))
        codes.append([(each.code, each.what, each.reason) for each in made.refusals])
    assert codes[0] == codes[1] != []


def test_the_header_of_a_gguf_file_is_needed(tmp_path: Path) -> None:
    """Its matrices have types of their own. A plan reads the headers of a model on a hub, which are gone afterwards."""
    case = CASES["gguf"]
    path = case.write(tmp_path)
    facts = read_facts(path)
    assert host_layers(config(**case.arguments), facts) is not None
    with pytest.raises(Refusal, match="the types of its matrices are in a file that is not on this machine"):
        host_layers(config(**case.arguments), replace(facts, path=str(tmp_path / "elsewhere.gguf")))


def test_a_buffer_is_overwritten_only_behind_its_last_use(tmp_path: Path) -> None:
    """Of each step of four layers with two buffers: what is awaited, and in which order."""
    small_model("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    chosen, notes = host_layers(config(), read_facts(tmp_path)), list[str]()
    streams = Streams(Recorded("compute", notes), Recorded("in", notes), HostStream())
    host = HostWeights(chosen, host_memory, HOST, streams)
    ours = built(tmp_path, layer_made=host.place)
    host.move()
    host.fetch_for_kernels()
    assert notes == []
    our_logits(ours, torch.arange(20))
    notes.clear()
    our_logits(ours, torch.arange(20))
    one = ["compute records", "compute waits", "in waits", "in copies", "in records"]
    assert notes == one * 4 * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sizes of Llama 3 8B."""
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    more = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    (path / "config.json").write_text(json.dumps({**CONFIG, **sizes, **more}))
    return path


def plan(folder: Path, device: str = "cuda:sm90", **values: Any) -> Any:
    return make_plan(user(model_path=str(folder), load_format="dummy", device=device, **values))


def test_a_plan_counts_what_stays_on_the_device(folder: Path) -> None:
    """19 of 32 layers of 416 MiB are 7.7 GiB, of which two buffers of that size stay."""
    plain, moved = plan(folder), plan(folder, host_offload_gb=8)
    assert plain.refusals == moved.refusals == ()
    layer = 2 * (4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14336)
    chosen = host_layers(moved.resolved.config, moved.model)
    assert len(chosen.indices) == 8 * GIB // layer == 19
    gaps = [after - before for before, after in zip(chosen.indices, chosen.indices[1:], strict=False)]
    assert set(gaps) <= {1, 2}
    assert (chosen.bytes, sum(chosen.buffers)) == (19 * layer, 2 * layer)
    weights = [next(line.predicted for line in each.ledger if line.name == "weights") for each in (plain, moved)]
    assert weights[0] - weights[1] == 17 * layer
    assert moved.budget.pages[0] > plain.budget.pages[0]


@every(
    ("values", "what", "code"),
    [
        ({"host_offload_gb": 1}, "host_offload_gb", "inert"),  # two layers fit, and two are on the device
        ({"offload_group_size": 40}, "offload_group_size", "cannot_offload"),
        ({"offload_group_size": 4, "tp_size": 2}, "offload_group_size", "excluded"),
        ({"offload_group_size": 4, "disable_graphs": False}, "disable_graphs", "excluded"),
        ({"host_offload_gb": 8, "device": "cpu:avx512"}, "host_offload_gb", "unsupported"),
    ],
)
def test_what_would_save_nothing_or_cannot_be_is_refused(
    folder: Path, values: dict[str, Any], what: str, code: str
) -> None:
    try:
        refusals = plan(folder, **values).refusals
    except Refusal as refusal:
        refusals = tuple(refusal.rejections)
    assert (what, code) in {(each.what, each.code) for each in refusals}
    assert all(each.reason and each.remedy for each in refusals)
    assert {each.who for each in refusals if each.what == what} == {"command line"}
