"""Models with recurrent layers: logits, sizes and weight names are those of transformers, and no field is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_small import (
    SHARED_EXPERTS,
    built,
    edit_config,
    edit_weights,
    expected_logits,
    randomized,
    small_model,
    tokens_of,
)
from planned_sizes import check_sizes
from recurrent_small import recurrent_logits
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from srv.models import derive
from srv.models.blueprint import MLP, Attention, MoE, Output
from srv.models.facts.special_layers import special_layers
from srv.models.families.registry import class_of_type
from srv.models.families.trees import native_tree
from srv.models.modules.decoder import Decoder
from srv.models.read import read_facts
from srv.models.unsupported import InvalidConfig, UnsupportedConfig
from srv.specs import FullAttention, Recurrent, SlidingWindow

NAMES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
}
TOKENS = 90  # more than a chunk of the delta rule
WIDE = {
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "linear_conv_kernel_dim": 6,
    "linear_key_head_dim": 12,
    "rms_norm_eps": 1e-3,
}
FEW_HEADS = {
    "attention_bias": True,
    "tie_word_embeddings": True,
    "linear_num_value_heads": 2,
    "num_key_value_heads": 6,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next: dense": ("qwen3_next", {}),
    "qwen3_next: biases, tied, few heads": ("qwen3_next", FEW_HEADS),
    "qwen3_next: layer types, wide convolution, wide keys": ("qwen3_next", WIDE),
    "qwen3_next: experts": ("qwen3_next", SHARED_EXPERTS),
    "qwen3_next: some experts, weights not renormalised": (
        "qwen3_next",
        {**SHARED_EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen3_next: a dense layer among experts": ("qwen3_next", {**SHARED_EXPERTS, "mlp_only_layers": [0]}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5: biases, tied, few heads": ("qwen3_5", FEW_HEADS),
    "qwen3_5: layer types, wide convolution, wide keys": ("qwen3_5", WIDE),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "lfm2": ("lfm2", {}),
    "lfm2: biases, size as stated, wide convolution": (
        "lfm2",
        {"conv_bias": True, "block_auto_adjust_ff_dim": False, "conv_L_cache": 5, "tie_word_embeddings": False},
    ),
    "lfm2: indices of layers, multiplied size": (
        "lfm2",
        {"layer_types": None, "full_attn_idxs": [2], "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 16},
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe: without biases of experts, scaled": (
        "lfm2_moe",
        {"use_expert_bias": False, "routed_scaling_factor": 1.5, "num_dense_layers": 0},
    ),
    "lfm2_moe: not renormalised": ("lfm2_moe", {"norm_topk_prob": False, "conv_bias": True}),
    "lfm2_moe: dense layers only": ("lfm2_moe", {"num_dense_layers": 3}),
    "lfm3": ("lfm3", {}),
    "lfm3: biases, without gates": (
        "lfm3",
        {"attention_bias": True, "conv_bias": True, "use_attention_gate": False, "tie_word_embeddings": False},
    ),
    "lfm3: without norms of outputs": ("lfm3", {"use_sandwich_norm": False, "conv_L_cache": 3}),
    "lfm3: windows only": (
        "lfm3",
        {
            "layer_types": ["conv", "sliding_attention", "sliding_attention"],
            "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
        },
    ),
    "recurrent_gemma": ("recurrent_gemma", {}),
    "recurrent_gemma: biases, untied, more channels, other pattern": (
        "recurrent_gemma",
        {
            "attention_bias": True,
            "tie_word_embeddings": False,
            "lru_width": 72,
            "conv1d_width": 3,
            "block_types": ["attention", "recurrent", "recurrent"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
            "logits_soft_cap": 5.0,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "olmo_hybrid: without positions, and one sign of the state": (
        "olmo_hybrid",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "linear_allow_neg_eigval": False,
            "layer_types": ["full_attention", "full_attention", "linear_attention"],
        },
    ),
    "olmo_hybrid: biases, tied, sizes by default": (
        "olmo_hybrid",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
        },
    ),
    "lfm3: other rotary embeddings": (
        "lfm3",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.7,
                    "rope_theta": 100.0,
                    "factor": 1.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@every("case", CASES)
def test_native_logits_and_parameter_counts_equal_transformers(case: str, tmp_path: Path) -> None:
    kind, fields = CASES[case]
    model = small_model(kind, **fields)
    model.save_pretrained(tmp_path)
    if kind == "olmo_hybrid":
        divide_convolutions(tmp_path, model.config)
    ours, facts, tokens = built(tmp_path, impl="srv"), read_facts(tmp_path), tokens_of(model, TOKENS)
    has_states = any(isinstance(group, Recurrent) for group in facts.cache_groups)
    assert (special_layers(facts).recurrent is not None) == has_states  # the budget counts what they need
    assert isinstance(ours, Decoder)
    assert facts.architecture == NAMES[kind]
    expected = expected_logits(model, tokens)
    assert expected.std() > 0.5, "the logits are too flat for the comparison to mean anything"
    assert relative(recurrent_logits(ours, facts, tokens, first=23), expected) < 1e-4
    counted = sum(parameter.numel() for parameter in model.parameters())
    biases = sum(each.numel() for name, each in model.named_buffers() if name.endswith("expert_bias"))
    tree = native_tree(facts.architecture, facts.config)
    assert derive.parameters(tree) == counted + biases == facts.parameters
    check_sizes(tmp_path, ours)
    matrices = {name: each.numel() for name, each in model.named_parameters() if each.dim() > 1}
    others = ("embed_tokens", "lm_head", "conv1d", "conv.conv", "conv_1d", "rg_lru", ".gate.")
    in_layers = (count for name, count in matrices.items() if not any(each in name for each in others))
    assert derive.projection_parameters(tree) == sum(in_layers)
    *paged, recurrent = facts.cache_groups
    assert isinstance(recurrent, Recurrent)
    types = dict(enumerate(model.config.layer_types))
    for group in paged:
        assert isinstance(group, FullAttention | SlidingWindow)
        kind = "full_attention" if isinstance(group, FullAttention) else "sliding_attention"
        assert group.layers == tuple(index for index in types if types[index] == kind)
    attending = tuple(sorted(index for group in paged for index in group.layers))
    assert attending == tuple(layer.index for layer in derive.attention_layers(tree))
    assert tuple(sorted((*attending, *recurrent.layers))) == (0, 1, 2)


def divide_convolutions(folder: Path, sizes: Any) -> None:
    """As published: transformers saves them as three parts of about the same size, whatever they belong to."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    keys = sizes.linear_num_key_heads * sizes.linear_key_head_dim
    values = sizes.linear_num_value_heads * sizes.linear_value_head_dim
    for name in [name for name in weights if name.endswith(".q_conv1d.weight")]:
        names = [name.replace(".q_conv1d.", f".{part}_conv1d.") for part in "qkv"]
        parts = torch.cat([weights[each] for each in names]).split([keys, keys, values])
        weights |= {each: part.contiguous() for each, part in zip(names, parts, strict=True)}
    save_file(weights, file, {"format": "pt"})


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
    ({"linear_num_value_heads": 3}, "3 value heads are not a multiple of 2 key heads"),
    ({"layer_types": ["full_attention", "sliding_attention", "mamba"]}, "the unknown 'mamba', 'sliding_attention'"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
    ({"layer_types": ["linear_attention"] * 3}, "no layer of full_attention"),
    ({**SHARED_EXPERTS, "num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 6 experts is not possible"),
    ({**SHARED_EXPERTS, "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0 is not a size"),
)


OF_OTHERS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("qwen3_5", {"num_experts": 4}, "num_experts = 4 is not implemented"),
    ("qwen3_5", {"layer_types": ["linear_attention"] * 3}, "no layer of full_attention"),
    ("qwen3_5_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 6 experts is not possible"),
    ("lfm2", {"layer_types": ["conv", "linear_attention", "full_attention"]}, "the unknown 'linear_attention'"),
    ("lfm2", {"layer_types": ["conv"] * 3}, "no layer of full_attention"),
    ("lfm2", {"num_experts": 4}, "num_experts = 4 is not implemented"),
    ("lfm3", {"layer_types": ["conv"] * 3}, "no layer of full_attention or sliding_attention"),
    ("lfm3", {"sliding_window": 0}, "sliding_window = 0 of layers of sliding_attention is not a number"),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "has no sliding_attention"),
    ("lfm3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "has no full_attention"),
    ("recurrent_gemma", {"block_types": ["recurrent"]}, "gives none of 3 layers attention"),
    ("recurrent_gemma", {"block_types": ["recurrent", "mamba"]}, "block_types contains the unknown 'mamba'"),
    ("recurrent_gemma", {"lru_width": 50}, "lru_width = 50 is not a multiple of 6 heads"),
    ("recurrent_gemma", {"hidden_activation": "relu"}, "hidden_activation = 'relu' is not implemented"),
    ("olmo_hybrid", {"linear_num_value_heads": 3}, "3 value heads are not a multiple of 2 key heads"),
    ("lfm2_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 of 6 experts is not possible"),
)


@every("case", [*(("qwen3_next", *each) for each in REFUSED), *OF_OTHERS])
def test_what_is_not_implemented_is_refused_by_name(case: tuple[str, dict[str, Any], str], tmp_path: Path) -> None:
    kind, fields, reason = case
    small_model(kind).config.save_pretrained(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises((InvalidConfig, UnsupportedConfig)) as raised:
        native_tree(NAMES[kind], json.loads((tmp_path / "config.json").read_text()))
    assert reason in str(raised.value)


def test_published_fields_before_transformers_5() -> None:
    """The rotated share of heads, and which layers attend, may be left out."""
    tree = native_tree(NAMES["qwen3_next"], {"rope_theta": 1e7, "rope_scaling": None, "num_hidden_layers": 8})
    attention = derive.find(tree, Attention)
    assert attention is not None
    assert attention.rope is not None
    assert (attention.rope.rotary_dim, attention.rope.theta) == (64, 1e7)
    assert [layer.index for layer in derive.attention_layers(tree)] == [3, 7]
    assert derive.find(tree, MLP) == derive.find(tree, MoE).shared
    published = {"block_ff_dim": 6656, "full_attn_idxs": [2, 5], "num_hidden_layers": 6, "tie_embedding": False}
    lfm2 = native_tree(NAMES["lfm2"], published)
    mlp, output = derive.find(lfm2, MLP), derive.find(lfm2, Output)
    assert mlp is not None
    assert output is not None
    assert (mlp.inner, output.tied) == (4608, False)
    assert [layer.index for layer in derive.attention_layers(lfm2)] == [2, 5]
    types = {"qwen3_next": "qwen3_next", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
    types |= {
        "lfm2": "lfm2",
        "lfm2_moe": "lfm2_moe",
        "lfm3": "lfm3",
        "recurrent_gemma": "recurrent_gemma",
        "olmo_hybrid": "olmo_hybrid",
    }
    assert {kind: class_of_type(each) for kind, each in types.items()} == NAMES


@every("kind", ["qwen3_5_moe", "lfm2_moe"])
def test_checkpoints_with_fused_experts_are_read(kind: str, tmp_path: Path) -> None:
    """As transformers has them in memory, and as Qwen3.5 is published."""
    model = small_model(kind)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith(".experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    ours, facts, tokens = built(tmp_path, impl="srv"), read_facts(tmp_path), tokens_of(model, TOKENS)
    assert relative(recurrent_logits(ours, facts, tokens), expected_logits(model, tokens)) < 1e-4


def test_the_language_model_of_a_published_folder(tmp_path: Path) -> None:
    """Weights of the vision part, and of the layer that predicts further tokens, are not read."""
    text = {**small_model("qwen3_5").config.to_dict(), "pad_token_id": 0}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    config = Qwen3_5Config(text_config=text, vision_config={**vision, "patch_size": 4, "num_position_embeddings": 16})
    model = randomized(Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    model.save_pretrained(tmp_path)
    edit_weights(tmp_path, mtp__fc__weight=torch.zeros(48, 96), mtp__layers__0__input_layernorm__weight=torch.zeros(48))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in names
    facts = read_facts(tmp_path)
    assert (facts.architecture, facts.text_part_of) == (NAMES["qwen3_5"], "Qwen3_5ForConditionalGeneration")
    tokens = torch.randint(3, 97, (TOKENS,), generator=torch.Generator().manual_seed(1))
    ours = recurrent_logits(built(tmp_path, impl="srv"), facts, tokens)
    assert relative(ours, expected_logits(model, tokens)) < 1e-4
