"""Qwen3-Next: logits, sizes and weight names are those of transformers, and no field is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_small import built, edit_config, expected_logits, small_model, tokens_of
from recurrent_small import recurrent_logits

from srv.models.architectures.qwen3_next import Qwen3NextConfig
from srv.models.architectures.qwen3_next_layers import Qwen3Next
from srv.models.architectures.registry import name_of_type, native_config
from srv.models.layers.rope_config import UnsupportedConfig
from srv.models.read import read_facts
from srv.specs import FullAttention, Recurrent

NAME = "Qwen3NextForCausalLM"
TOKENS = 90  # more than a chunk of the delta rule
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "biases, tied, few heads": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "linear_num_value_heads": 2,
        "num_key_value_heads": 6,
    },
    "layer types, wide convolution, wide keys": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "linear_conv_kernel_dim": 6,
        "linear_key_head_dim": 12,
        "rms_norm_eps": 1e-3,
    },
    "experts": EXPERTS,
    "some experts, weights not renormalised": {**EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": False},
    "a dense layer among experts": {**EXPERTS, "mlp_only_layers": [0]},
}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@every("case", CASES)
def test_native_logits_and_parameter_counts_equal_transformers(case: str, tmp_path: Path) -> None:
    model = small_model("qwen3_next", **CASES[case])
    model.save_pretrained(tmp_path)
    ours, facts, tokens = built(tmp_path, impl="srv"), read_facts(tmp_path), tokens_of(model, TOKENS)
    assert isinstance(ours, Qwen3Next)
    expected = expected_logits(model, tokens)
    assert expected.std() > 0.5, "the logits are too flat for the comparison to mean anything"
    assert relative(recurrent_logits(ours, facts, tokens, first=23), expected) < 1e-4
    counted = sum(parameter.numel() for parameter in model.parameters())
    config = native_config(facts.architecture, facts.config)
    assert config.parameters == counted == facts.parameters
    matrices = sum(parameter.numel() for name, parameter in model.named_parameters() if parameter.dim() > 1)
    others = ("embed_tokens", "lm_head", "conv1d", "mlp.gate.", "shared_expert_gate")
    excluded = sum(p.numel() for name, p in model.named_parameters() if any(each in name for each in others))
    assert config.projection_params == matrices - excluded
    full, recurrent = facts.cache_groups
    assert isinstance(full, FullAttention)
    assert isinstance(recurrent, Recurrent)
    attending = tuple(i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention")
    assert full.layers == attending == tuple(layer.index for layer in config.attention_layers)
    assert tuple(sorted((*full.layers, *recurrent.layers))) == (0, 1, 2)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
    ({"linear_num_value_heads": 3}, "3 value heads are not a multiple of 2 key heads"),
    ({"layer_types": ["full_attention", "sliding_attention", "mamba"]}, "the unknown 'mamba', 'sliding_attention'"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
    ({"layer_types": ["linear_attention"] * 3}, "no layer of full_attention"),
    ({**EXPERTS, "num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 6 experts is not possible"),
    ({**EXPERTS, "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0 is not a size"),
)


@every("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(case: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    small_model("qwen3_next").save_pretrained(tmp_path)
    edit_config(tmp_path, **case[0])
    config = read_config(tmp_path)
    with pytest.raises(UnsupportedConfig) as raised:
        native_config(NAME, config)
    assert case[1] in str(raised.value)


def read_config(folder: Path) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_published_fields_before_transformers_5() -> None:
    """The rotated share of heads, and which layers attend, may be left out."""
    config = native_config(NAME, {"rope_theta": 1e7, "rope_scaling": None, "num_hidden_layers": 8})
    assert isinstance(config, Qwen3NextConfig)
    assert (config.decoder.rope.rotary_dim, config.decoder.rope.theta) == (64, 1e7)
    assert [index for index, attends in enumerate(config.attends) if attends] == [3, 7]
    assert all(config.has_experts)
    assert name_of_type("qwen3_next") == NAME
