"""Models with an indexer against transformers: logits, sizes, loaded tensors, by the attention of the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from indexed_small import COMMON, MODELS, small
from latent_steps import Steps
from models_small import built, expected_logits
from planned_sizes import check_sizes
from safetensors.torch import save_file
from thread_ranks import ThreadCommunicator, on_ranks
from torch import Tensor

from srv.dist.group import RankGroup
from srv.models.blueprint.indexers import hy_v4_types, indexer_types
from srv.models.families.trees import native_tree
from srv.models.read import read_facts
from srv.models.unsupported import UnsupportedConfig
from srv.specs import Latent

INDEXED = {"glm": (0, 2), "glm-shared": (0,), "hy": (0, 2), "hy-yarn": (0, 1)}  # all layers of the others
TOKENS = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(2))


def saved(kind: str, folder: Path, **fields: Any) -> Any:
    model = small(kind, **fields)
    model.save_pretrained(folder)
    return model


@every("kind", list(MODELS))
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """In one pass; then in chunks, and token by token beside another row, after the ninth token with chosen keys."""
    reference = saved(kind, tmp_path)
    facts, expected = read_facts(tmp_path), expected_logits(reference, TOKENS)
    assert facts.cache_groups == (Latent((0, 1, 2), 16, 16, index_dim=24, indexed=INDEXED.get(kind, (0, 1, 2))),)
    steps = Steps(model := built(tmp_path), facts.cache_groups[0])
    close = {"atol": 2e-4, "rtol": 1e-4}
    torch.testing.assert_close(steps.run([(list(range(1, 11)), TOKENS, 0)]), expected, **close)
    pages = list(range(11, 21))
    chunked = [steps.run([(pages, TOKENS[:7], 0)]), steps.run([(pages, TOKENS[7:30], 7)])]
    for done in range(30, 40):
        other = list(range(1, 11)), TOKENS[done - 15 : done - 14], done - 15
        chunked.append(steps.run([(pages, TOKENS[done : done + 1], done), other])[:1])
    torch.testing.assert_close(torch.cat(chunked), expected, **close)
    buffers = sum(each.nbytes for name, each in reference.named_buffers() if name.endswith("e_score_correction_bias"))
    assert model.loaded_bytes() == facts.weight_bytes == 4 * reference.num_parameters() + buffers
    check_sizes(tmp_path, model)


def test_the_choice_matters_and_ends_where_all_keys_are_chosen(tmp_path: Path) -> None:
    """Logits differ from those of a model that chooses all, but for the first `index_topk` tokens."""
    few, every_key = saved("v32", tmp_path / "few"), saved("v32", tmp_path / "all", index_topk=64)
    logits = []
    for folder, reference in (("few", few), ("all", every_key)):
        steps = Steps(built(tmp_path / folder), read_facts(tmp_path / folder).cache_groups[0])
        logits.append(steps.run([(list(range(1, 11)), TOKENS, 0)]))
        torch.testing.assert_close(logits[-1], expected_logits(reference, TOKENS), atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits[0][:9], logits[1][:9], atol=1e-5, rtol=1e-5)
    assert float((logits[0][9:] - logits[1][9:]).abs().amax(-1).min()) > 0.01


@every("kind", ["glm", "axk2", "hy"])
def test_two_ranks_compute_what_one_does(kind: str, tmp_path: Path) -> None:
    """Heads, experts and the vocabulary are divided; each rank has the indexer, gates of norms and residual streams."""
    reference = saved(kind, tmp_path, vocab_size=98)
    latents = read_facts(tmp_path).cache_groups[0]
    assert isinstance(latents, Latent)

    def run(group: RankGroup, communicator: ThreadCommunicator) -> Tensor:
        steps = Steps(built(tmp_path, group=group, communicator=communicator), latents)
        pages = list(range(1, 7))
        return torch.cat((steps.run([(pages, TOKENS[:17], 0)]), steps.run([(pages, TOKENS[17:18], 17)])))

    for logits in on_ranks(2, run):
        torch.testing.assert_close(logits, expected_logits(reference, TOKENS)[:18], atol=2e-4, rtol=1e-4)


def test_weights_by_the_names_of_transformers_and_of_publishers_are_the_same(tmp_path: Path) -> None:
    """Transformers saves HY-V4 by published names, with modules in another order than it reads."""
    reference = saved("hy", tmp_path / "saved")
    own = {name: value.clone() for name, value in reference.state_dict().items()}
    published = {}
    for name, value in own.items():
        if "hc_head" in name:
            name = name.replace("hc_head.hc_", "hc_head.hc_pre.hc_head_")
        for stored, layer in (("hc_attn_layer", "attn_hc"), ("hc_mlp_layer", "ffn_hc")):
            name = name.replace(f".{layer}.", f".{stored}.hc_pre.hc_")
        name = name.replace("self_attn.sinks", "self_attn.learnable_sink_param")
        published[name.replace("self_attn.gate_proj", "self_attn.linear_gate")] = value
    expected = expected_logits(reference, TOKENS)
    for label, tensors in (("own", own), ("published", published)):
        folder = tmp_path / label
        folder.mkdir()
        reference.config.save_pretrained(folder)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        steps = Steps(built(folder), read_facts(folder).cache_groups[0])
        logits = steps.run([(list(range(1, 11)), TOKENS, 0)])
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@every("layers", [1, 2, 7])
def test_the_indexers_of_hy_v4_are_those_of_transformers(layers: int) -> None:
    from transformers import HYV4Config

    assert hy_v4_types({}.get, layers) == HYV4Config(num_hidden_layers=layers).indexer_types


@every("fields,types", [
    ({}, "FFFFF"),
    ({"indexer_types": ["full", "shared", "full", "shared", "shared"]}, "FSFSS"),
    ({"index_topk_pattern": "FSSFS"}, "FSSFS"),
    ({"index_topk_freq": 2}, "FFSFS"),
    ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSF"),
    ({"index_topk_freq": 3, "index_skip_topk_offset": 0}, "SSFSS"),
])  # fmt: skip
def test_which_layers_have_an_indexer_is_what_transformers_says(fields: dict[str, Any], types: str) -> None:
    from transformers import GlmMoeDsaConfig

    found = indexer_types(fields.get, 5)
    assert "".join(kind[0].upper() for kind in found) == types
    assert found == GlmMoeDsaConfig(num_hidden_layers=5, **fields).indexer_types


@every("architecture,fields,reason", [
    ("DeepseekV32ForCausalLM", {"index_topk": 0}, "index_topk = 0 is not a size"),
    ("DeepseekV32ForCausalLM", {"index_head_dim": 8}, "index_head_dim = 8 has no room for qk_rope_head_dim = 16"),
    ("DeepseekV32ForCausalLM", {"q_lora_rank": None}, "q_lora_rank = None"),
    ("DeepseekV32ForCausalLM", {"layer_types": ["full_attention"] * 3}, "layer_types with full_attention"),
    ("DeepseekV32ForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types = ['dense']"),
    ("GlmMoeDsaForCausalLM", {"indexer_types": ["shared", "full", "full"]}, "indexer_types = ['shared'"),
    ("GlmMoeDsaForCausalLM", {"indexer_types": ["full"]}, "for each of 3 layers"),
    ("AXK2ForCausalLM", {"n_group": 4, "topk_group": 2}, "n_group = 4 is not implemented natively"),
    ("AXK2ForCausalLM", {"gated_norm_rank": 0}, "gated_norm_rank = 0 is not a size"),
    ("AXK2ForCausalLM", {"moe_layer_freq": 0}, "moe_layer_freq = 0 is not a number of layers"),
    ("AXK2ForCausalLM", {"q_lora_rank": None}, "q_lora_rank = None"),
    ("HYV4ForCausalLM", {"indexer_types": ["full"]}, "for each of 3 layers"),
    ("HYV4ForCausalLM", {"layer_types": ["full_attention"] * 3}, "layer_types with full_attention"),
    ("HYV4ForCausalLM", {"swiglu_limit": 7.0}, "swiglu_limit = 7.0"),
    ("HYV4ForCausalLM", {"hc_mult": 0}, "hc_mult = 0 is not a number of residual streams"),
])  # fmt: skip
def test_what_is_not_implemented_is_named(architecture: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedConfig, match=re.escape(reason)):
        native_tree(architecture, {**COMMON, "n_group": 1, "topk_group": 1, **fields})
