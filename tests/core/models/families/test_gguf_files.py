"""GGUF files as llama.cpp's converter writes them: the logits of transformers, of each architecture that is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from every import every
from gguf import GGMLQuantizationType as Kind
from gguf_cases import CASES, expected, recorded, served_logits, write_gguf
from models_reference_ops import reference_ops
from models_small import HOST, built, expected_logits, our_logits, tokens_of
from planned_sizes import planned_bytes

from srv.dist.group import RankGroup
from srv.errors import ModelError
from srv.models.build import load_layers
from srv.models.checkpoints.gguf_loader import load_gguf
from srv.models.checkpoints.matching import cut
from srv.models.checkpoints.reading import Reading
from srv.models.facts.gguf_rules import gguf_rules
from srv.models.families.registry import gguf_layout, gguf_names
from srv.models.families.trees import native_tree
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.models.locate import located
from srv.models.read import read_facts
from srv.quantization.layers.blocks import GGUFExperts

HEADS = ("heads", "kv_heads", "head_dim")


@pytest.mark.slow
@every("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With the weights of the file, whose matrices stay in blocks; the file has as many as the checkpoint."""
    case = CASES[name]
    model, path = case.made(), tmp_path / "model.gguf"
    model.save_pretrained(tmp_path)
    write_gguf(name, tmp_path, path, Kind.Q8_0)
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    tokens, facts = tokens_of(model), read_facts(path)
    ours = built(path, impl="srv", dequantize=False, context_length=64)
    torch.testing.assert_close(served_logits(ours, facts, tokens), expected(model, tokens), atol=2e-4, rtol=1e-4)
    checkpoint = read_facts(tmp_path)
    assert [getattr(facts, each) for each in HEADS] == [getattr(checkpoint, each) for each in HEADS]
    if name != "xlm-roberta":  # its files are BERT's, without the positions that no token has
        assert (facts.architecture, facts.parameters) == (checkpoint.architecture, checkpoint.parameters)
    assert ours.loaded_bytes() == planned_bytes(path, dequantize_weights=False)


def test_experts_of_gpt_oss_are_in_mxfp4(tmp_path: Path) -> None:
    """As its published files have them, beside biases, which the blocks do not contain."""
    model, path = CASES["gpt-oss"].made(), tmp_path / "model.gguf"
    model.save_pretrained(tmp_path)
    write_gguf("gpt-oss", tmp_path, path, Kind.Q8_0, experts=Kind.MXFP4)
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    ours, tokens = built(path, impl="srv", dequantize=False), tokens_of(model)
    assert sum(isinstance(module, GGUFExperts) for module in ours.modules()) == 2
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned_bytes(path, dequantize_weights=False)


def test_older_files_of_qwen3_next_have_queries_keys_values_and_gates_of_each_head_together(tmp_path: Path) -> None:
    """As its checkpoints do."""
    record = recorded()["qwen3next"]
    tensors = dict(record["tensors"])
    layers = tensors.pop("blk.{}.attn_qkv.weight")["layers"]
    del tensors["blk.{}.attn_gate.weight"]
    source = "model.layers.{}.linear_attn.in_proj_qkvz.weight"
    whole = {"source": source, "shape": [192, 64], "begin": 0, "axes": [[192 * 64, 1]], "layers": layers}
    model, path = CASES["qwen3next"].made(), tmp_path / "model.gguf"
    model.save_pretrained(tmp_path)
    write_gguf("qwen3next", tmp_path, path, record={**record, "tensors": {**tensors, "blk.{}.ssm_in.weight": whole}})
    tokens, facts = tokens_of(model), read_facts(path)
    ours = served_logits(built(path, impl="srv"), facts, tokens)
    torch.testing.assert_close(ours, expected(model, tokens), atol=2e-4, rtol=1e-4)


@every("name", ["deepseek3", "glm4", "gpt-oss", "phi3"])
def test_ranks_load_their_parts(name: str, tmp_path: Path) -> None:
    """Of fused and permuted matrices, of the two parts of an up-projection, and of experts and their biases."""
    CASES[name].made().save_pretrained(tmp_path)
    write_gguf(name, tmp_path, path := tmp_path / "model.gguf")
    facts = read_facts(path)
    whole, tree = built(path, impl="srv").weight_views(), native_tree(facts.architecture, facts.config)
    for rank in range(2):
        context = BuildContext(HOST, torch.float32, reference_ops(), RankGroup(rank=rank, size=2))
        model = load_layers(facts.architecture)(tree, LayerFactory(context), 64)
        views, slices = model.weight_views(), model.weight_slices()
        with torch.no_grad():
            load_gguf(facts, gguf_layout(facts.architecture), gguf_rules(facts), views, slices=slices)
        assert slices
        assert views.keys() == whole.keys()
        for each, view in views.items():
            torch.testing.assert_close(view, cut(whole[each], slices.get(each)), rtol=0, atol=0)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    """The first one is named, or their folder; the table of tensors is that of all."""
    case = CASES["llama"]
    model = case.made()
    folder, files = tmp_path / "folder", tmp_path / "files"
    model.save_pretrained(folder)
    files.mkdir()
    write_gguf("llama", folder, files / "tiny.gguf", tensors=9)
    names = [f"tiny-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    assert sorted(each.name for each in files.iterdir()) == names
    first = located(files)
    assert first == files / names[0]
    facts = read_facts(first)
    assert (facts.name, facts.parameters) == ("tiny", model.num_parameters())
    tokens = tokens_of(model)
    for reading in (Reading(), Reading(mapped=False)):
        ours = our_logits(built(first, impl="srv", reading=reading), tokens)
        torch.testing.assert_close(ours, expected_logits(model, tokens), atol=2e-4, rtol=1e-4)
    with pytest.raises(ModelError, match=f"one of 3 parts. Give the first one, {names[0]}"):
        read_facts(files / names[1])
    shutil.copy(files / names[1], files / names[2])
    with pytest.raises(ModelError, match=f"{names[2]} is not part 3 of this model"):
        read_facts(first)
    (files / names[2]).unlink()
    with pytest.raises(ModelError, match=f"{names[2]}: it cannot be read"):
        read_facts(first)


@every(
    ("name", "key", "value", "usual"),
    [
        *((name, "expert_gating_func", 1, 2) for name in ("deepseek3", "glm4moe", "lfm2moe", "minimax-m2")),
        *((name, "expert_gating_func", 2, 1) for name in ("deepseek2", "mixtral", "gpt-oss")),
        *((name, "attention.causal", True, False) for name in ("bert", "jina-bert-v3", "modern-bert", "nomic-bert")),
        ("llama", "attention.causal", False, True),
    ],
)
def test_what_layers_compute_otherwise_is_refused_by_name(
    name: str, key: str, value: object, usual: object, tmp_path: Path
) -> None:
    CASES[name].made().save_pretrained(tmp_path)
    record = recorded()[name]
    stated = f"{record['metadata']['general.architecture']}.{key}"

    def written(said: object) -> Path:
        path = tmp_path / f"{said}.gguf"
        write_gguf(name, tmp_path, path, record={**record, "metadata": {**record["metadata"], stated: said}})
        return path

    assert read_facts(written(usual)).parameters
    with pytest.raises(ModelError, match=f"metadata {stated} = {value!r} is not implemented"):
        read_facts(written(value))


def test_every_architecture_that_is_read_was_converted() -> None:
    converted = {each["metadata"]["general.architecture"] for each in recorded().values()}
    assert converted == set(gguf_names())
