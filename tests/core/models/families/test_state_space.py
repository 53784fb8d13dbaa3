"""Models with Mamba, Mamba-2 or lightning attention: logits, sizes and names are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_small import GRANITE, built, edit_config, expected_logits, small_model, tokens_of
from planned_sizes import check_sizes
from recurrent_small import recurrent_logits
from safetensors.torch import load_file, save_file

from srv.models import derive
from srv.models.facts.special_layers import special_layers
from srv.models.families.registry import class_of_type
from srv.models.families.trees import native_tree
from srv.models.read import read_facts
from srv.models.unsupported import InvalidConfig, UnsupportedConfig
from srv.specs import FullAttention, Recurrent, SlidingWindow

NAMES = {
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "bamba": "BambaForCausalLM",
    "jamba": "JambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "minimax": "MiniMaxForCausalLM",
}
TOKENS = 90  # more than a chunk of the scan
ATTENDING = ["full_attention"] * 3
BIASES = {"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True}
SCALED = {
    "lm_head_multiplier": 0.6,
    "embedding_multiplier": 2.5,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.4,
    "attention_out_multiplier": 1.2,
    "attention_in_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.6,
}
RESIDUALS = {
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 0.9,
    "linear_attn_beta_factor": 1.4,
    "mlp_alpha_factor": 1.2,
    "mlp_beta_factor": 0.7,
}
EXPERTS = {"hybrid_override_pattern": "ME*E"}
NORMED = {"mamba_rms_norm": True, "mlp_bias": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite: experts": ("granitemoehybrid", {}),
    "granite: multipliers, rotary embedding": ("granitemoehybrid", {**GRANITE, "position_embedding_type": "rope"}),
    "granite: without experts": ("granitemoehybrid", {**GRANITE, "num_local_experts": 0}),
    "granite: biases, tied, one group": ("granitemoehybrid", {**BIASES, "mamba_n_groups": 1, "mamba_d_conv": 3}),
    "granite: attention only": (
        "granitemoehybrid",
        {"layer_types": ATTENDING, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "bamba": ("bamba", {}),
    "bamba: biases, tied, two attending layers": ("bamba", {**BIASES, "mlp_bias": True, "attn_layer_indices": [0, 2]}),
    "jamba: experts in every second layer": ("jamba", {}),
    "jamba: biases, tied, one expert": (
        "jamba",
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True, "num_experts": 1},
    ),
    "jamba: experts in all layers, rank by default": (
        "jamba",
        {
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "mamba_dt_rank": "auto",
            "mamba_d_conv": 3,
            "mamba_expand": 1,
        },
    ),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1: multipliers": ("falcon_h1", SCALED),
    "falcon_h1: norm before the gate": ("falcon_h1", {**SCALED, **NORMED, "projectors_bias": True, "head_dim": 12}),
    "falcon_h1: norm after the gate, biases, tied": (
        "falcon_h1",
        {**NORMED, **BIASES, "mamba_norm_before_gate": False, "mamba_d_ssm": None},
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h: biases, kinds by name, one group": (
        "nemotron_h",
        {
            "layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention"],
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_groups": 1,
            "layer_norm_epsilon": 1e-2,
        },
    ),
    "nemotron_h: experts": ("nemotron_h", EXPERTS),
    "nemotron_h: experts of a smaller hidden size, groups": (
        "nemotron_h",
        {
            **EXPERTS,
            "moe_latent_size": 16,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
        },
    ),
    "minimax": ("minimax", {}),
    "minimax: residuals, wide heads": ("minimax", {**RESIDUALS, "head_dim": 12}),
    "minimax: layer types, tied": (
        "minimax",
        {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "tie_word_embeddings": True},
    ),
    "minimax: window": ("minimax", {"sliding_window": 7}),
}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@every("case", CASES)
def test_native_logits_and_parameter_counts_equal_transformers(case: str, tmp_path: Path) -> None:
    kind, fields = CASES[case]
    model = small_model(kind, **fields)
    model.save_pretrained(tmp_path)
    ours, facts, tokens = built(tmp_path, impl="srv"), read_facts(tmp_path), tokens_of(model, TOKENS)
    has_states = any(isinstance(group, Recurrent) for group in facts.cache_groups)
    assert (special_layers(facts).recurrent is not None) == has_states  # the budget counts what they need
    assert facts.architecture == NAMES[kind]
    expected = expected_logits(model, tokens)
    assert expected.std() > 0.3, "the logits are too flat for the comparison to mean anything"
    assert relative(recurrent_logits(ours, facts, tokens, first=23), expected) < 1e-4
    biases = (each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
    counted = sum(each.numel() for each in (*model.parameters(), *biases))
    tree = native_tree(facts.architecture, facts.config)
    assert derive.parameters(tree) == counted == facts.parameters
    check_sizes(tmp_path, ours)
    matrices = {name: each.numel() for name, each in model.named_parameters() if each.dim() > 1}
    others = ("embed_tokens", ".embeddings", "lm_head", "conv1d", "A_log", ".gate.", ".router.")
    assert derive.projection_parameters(tree) == sum(
        count for name, count in matrices.items() if not any(each in name for each in others)
    )
    full = [layer for group in facts.cache_groups if not isinstance(group, Recurrent) for layer in group.layers]
    assert full == [layer.index for layer in derive.attention_layers(tree)]
    recurrent = [layer for group in facts.cache_groups if isinstance(group, Recurrent) for layer in group.layers]
    with_states = [i for i, layer in enumerate(model.model.layers) if _has_states(layer)]
    assert recurrent == with_states
    assert {type(group) for group in facts.cache_groups} <= {FullAttention, SlidingWindow, Recurrent}


def _has_states(layer: Any) -> bool:
    return any(hasattr(each, "A_log") or hasattr(each, "slope_rate") for each in layer.modules())


BY_PATTERN = {"layers_block_type": None}
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "no layer of full_attention"),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention", "conv"]}, "the unknown 'conv'"),
    ("granitemoehybrid", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 5 experts is not possible"),
    ("granitemoehybrid", {"shared_intermediate_size": 0}, "shared_intermediate_size = 0 is not a size"),
    ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
    ("granitemoehybrid", {"time_step_limit": [0.1, 0.5]}, "time_step_limit = [0.1, 0.5] is not implemented"),
    ("bamba", {"attn_layer_indices": []}, "attn_layer_indices = [] names no layer with attention"),
    ("bamba", {"mamba_n_groups": 5}, "12 heads are not a multiple of 5 groups"),
    ("bamba", {"mamba_d_head": 7}, "12 heads of 7 (mamba_n_heads, mamba_d_head) are not 96 in all"),
    ("jamba", {"attn_layer_period": 9, "attn_layer_offset": 8}, "attn_layer_offset gives none of 3 layers attention"),
    ("jamba", {"expert_layer_offset": 2}, "expert_layer_offset = 2 is not below expert_layer_period = 2"),
    ("jamba", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 5 experts is not possible"),
    ("jamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
    ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers has 2 values and not 5"),
    ("falcon_h1", {"lm_head_multiplier": 0.0}, "lm_head_multiplier = 0.0 is not a positive number"),
    ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, "layers_block_type contains the unknown 'conv'"),
    ("nemotron_h", {"layers_block_type": ["mlp", "mamba"]}, "layers_block_type has no layer of full_attention"),
    (
        "nemotron_h",
        {**BY_PATTERN, "hybrid_override_pattern": "M*X"},
        "hybrid_override_pattern contains the unknown 'X'",
    ),
    ("nemotron_h", {**EXPERTS, **BY_PATTERN, "n_group": 4}, "6 experts cannot be in n_group = 4 groups"),
    (
        "nemotron_h",
        {**EXPERTS, **BY_PATTERN, "num_experts_per_tok": 7},
        "num_experts_per_tok = 7 of 6 experts is not possible",
    ),
    ("nemotron_h", {**EXPERTS, **BY_PATTERN, "n_shared_experts": 2}, "n_shared_experts = 2 is not implemented"),
    ("nemotron_h", {"n_groups": 5}, "12 heads are not a multiple of 5 groups"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not implemented"),
    ("nemotron_h", {"time_step_limit": [0.1, 0.5]}, "time_step_limit = [0.1, 0.5] is not implemented"),
    ("minimax", {"layer_types": ["linear_attention"] * 3}, "no layer of full_attention"),
    ("minimax", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 5 experts is not possible"),
)


@every("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(case: tuple[str, dict[str, Any], str], tmp_path: Path) -> None:
    kind, fields, reason = case
    small_model(kind).config.save_pretrained(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises((InvalidConfig, UnsupportedConfig)) as raised:
        native_tree(NAMES[kind], json.loads((tmp_path / "config.json").read_text()))
    assert reason in str(raised.value)


def test_model_types_are_known() -> None:
    assert {kind: class_of_type(kind) for kind in NAMES} == NAMES


@every("kind", ["granitemoehybrid", "jamba", "minimax"])
def test_checkpoints_with_the_names_of_transformers_are_read(kind: str, tmp_path: Path) -> None:
    """As transformers has experts in memory; published files have other names."""
    model = small_model(kind)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith(".experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    ours, facts, tokens = built(tmp_path, impl="srv"), read_facts(tmp_path), tokens_of(model, TOKENS)
    assert relative(recurrent_logits(ours, facts, tokens), expected_logits(model, tokens)) < 1e-4


def test_kinds_of_layers_as_published(tmp_path: Path) -> None:
    """Granite's files call them mamba and attention."""
    model = small_model("granitemoehybrid")
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=["mamba", "attention", "mamba"], position_embedding_type="nope")
    ours, facts, tokens = built(tmp_path, impl="srv"), read_facts(tmp_path), tokens_of(model, TOKENS)
    assert relative(recurrent_logits(ours, facts, tokens), expected_logits(model, tokens)) < 1e-4


@every(("original", "prefix"), [(True, "backbone."), (False, "model.")])
def test_nemotron_h_as_published_and_as_transformers_names_it(original: bool, prefix: str, tmp_path: Path) -> None:
    """`time_step_min` is of the training: transformers clamps steps by it, the published implementation does not."""
    model = small_model("nemotron_h")
    model.save_pretrained(tmp_path, save_original_format=original)
    stored = load_file(tmp_path / "model.safetensors")
    predicting = ("mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.weight")  # which are not read
    save_file(stored | {name: torch.ones(3) for name in predicting}, tmp_path / "model.safetensors")
    assert {f"{prefix}embeddings.weight", f"{prefix}norm_f.weight"} < set(stored)
    edit_config(tmp_path, layers_block_type=None, hybrid_override_pattern="M*-M-", time_step_min=0.5)
    ours, facts, tokens = built(tmp_path, impl="srv"), read_facts(tmp_path), tokens_of(model, TOKENS)
    assert relative(recurrent_logits(ours, facts, tokens), expected_logits(model, tokens)) < 1e-4
