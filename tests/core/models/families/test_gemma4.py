"""Gemma 4: logits and sizes are those of transformers, and no field is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bfloat16_models import MODELS
from every import every
from model_cells import random_model
from models_small import built, edit_config, edit_weights, expected_logits, our_logits, tokens_of
from planned_sizes import check_sizes
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks
from transformers import Gemma4Config

from srv.models import derive
from srv.models.blueprint import MoE
from srv.models.facts.sharding import divisions, rank_facts
from srv.models.facts.special_layers import special_layers
from srv.models.families.trees import native_tree
from srv.models.read import read_facts
from srv.models.unsupported import UnsupportedConfig

NAMES = {"gemma4_text": "Gemma4ForCausalLM", "gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
PLAIN = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "inputs of layers, and layers that read lower caches": ("gemma4_text", {}),
    "experts": ("gemma4_text", {**PLAIN, **EXPERTS}),
    "wide MLPs of layers that read lower caches": ("gemma4_text", {"use_double_wide_mlp": True, **EXPERTS}),
    "values of their own, biases, untied": (
        "gemma4_text",
        {
            "attention_k_eq_v": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
        },
    ),
    "rotary embeddings, kinds by default": (
        "gemma4_text",
        {**PLAIN, "rope_parameters": ROPE, "layer_types": None, "use_bidirectional_attention": "vision"},
    ),
    "unified": ("gemma4_unified_text", {}),
    "unified, wide MLPs": ("gemma4_unified_text", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
}


def random_gemma(kind: str = "gemma4_text", **fields: Any) -> Any:
    model = random_model(kind, **{**MODELS[NAMES[kind]].fields, **fields})
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    return model


@every("case", CASES)
def test_logits_and_sizes_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, fields = CASES[case]
    model = random_gemma(kind, **fields)
    model.save_pretrained(tmp_path)
    ours, facts, tokens = built(tmp_path, impl="srv"), read_facts(tmp_path), tokens_of(model)
    assert facts.architecture == NAMES[kind]
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4)
    tree = native_tree(facts.architecture, facts.config)
    counted = sum(each.numel() for each in model.parameters()) + model.config.num_hidden_layers
    assert derive.parameters(tree) == counted == facts.parameters
    assert (special_layers(facts).mixture is not None) == bool(fields.get("enable_moe_block"))
    check_sizes(tmp_path, ours)


def test_heads_of_layers_as_published(tmp_path: Path) -> None:
    """In fields of their own, where transformers saves a table of layers; and within the folder of a vision model."""
    model = random_gemma(**EXPERTS)
    model.save_pretrained(tmp_path)
    tokens, tensors = tokens_of(model), load_file(tmp_path / "model.safetensors")
    heads = {"global_head_dim": 128, "num_global_key_value_heads": 1}
    edit_config(tmp_path, per_layer_config=None, **heads)
    ours = our_logits(built(tmp_path, impl="srv"), tokens)
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=2e-4, rtol=1e-4)
    text = {**json.loads((tmp_path / "config.json").read_text()), "architectures": None}
    whole = Gemma4Config(text_config=model.config.to_dict()).to_dict()
    whole |= {"text_config": text, "architectures": ["Gemma4ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    named = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    save_file({**named, "model.vision_tower.stem.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    facts = read_facts(tmp_path)
    assert (facts.architecture, facts.text_part_of) == (NAMES["gemma4_text"], "Gemma4ForConditionalGeneration")
    assert torch.equal(our_logits(built(tmp_path, impl="srv"), tokens), ours)


def test_keys_that_a_layer_reads_elsewhere_are_skipped(tmp_path: Path) -> None:
    """Published checkpoints have them."""
    model = random_gemma()
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model)
    edit_weights(tmp_path, model__layers__3__self_attn__k_proj__weight=torch.ones(128, 64))
    assert read_facts(tmp_path).parameters == sum(each.numel() for each in model.parameters()) + 4
    ours = our_logits(built(tmp_path, impl="srv"), tokens)
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=2e-4, rtol=1e-4)


def test_ranks_compute_the_same_logits(tmp_path: Path) -> None:
    """KV heads of layers with full attention are copied, the others divided."""
    model = random_gemma(**{**EXPERTS, "vocab_size": 96, "vocab_size_per_layer_input": 96})
    model.save_pretrained(tmp_path)
    facts, tokens = read_facts(tmp_path), tokens_of(model)
    sizes = divisions(facts, in_blocks=False)
    assert not isinstance(sizes, str)
    assert [each.size for each in sizes.sizes if each.name == "KV heads"] == [2, 1]
    assert sizes.legal_ranks() == (1, 2, 4)
    assert [group.kv_heads for group in rank_facts(facts, 2).cache_groups if hasattr(group, "kv_heads")] == [1, 1]
    parts = on_ranks(
        2, lambda group, comm: our_logits(built(tmp_path, impl="srv", group=group, communicator=comm), tokens)
    )
    for logits in parts:
        torch.testing.assert_close(logits, expected_logits(model, tokens), atol=2e-4, rtol=1e-4)


def test_experts_count_as_a_mixture(tmp_path: Path) -> None:
    random_gemma(**EXPERTS).config.save_pretrained(tmp_path)
    tree = native_tree(NAMES["gemma4_text"], json.loads((tmp_path / "config.json").read_text()))
    found = derive.find(tree, MoE)
    assert found is not None
    assert (found.experts.count, found.experts.used, found.routing.renormalize) == (5, 2, True)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"hidden_activation": "relu"}, "hidden_activation = 'relu' is not implemented"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not implemented"),
    ({**EXPERTS, "top_k_experts": 6}, "top_k_experts = 6 of 5 experts is not possible"),
    ({**EXPERTS, "moe_intermediate_size": 0}, "moe_intermediate_size = 0 is not a size"),
    ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config has sliding_window of layer 1"),
    ({"per_layer_config": {"0": {"head_dim": 32}}}, "gives layer 0, which has a window, heads of 32"),
    ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "4 attention heads are not a multiple of 3 key heads"),
)


@every("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(case: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    fields, reason = case
    random_gemma().config.save_pretrained(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(UnsupportedConfig) as raised:
        native_tree(NAMES["gemma4_text"], json.loads((tmp_path / "config.json").read_text()))
    assert reason in str(raised.value)
