"""Further mixtures of experts have the logits and parameters of transformers, for small random models in float32.

Those of classes that transformers does not have are compared with `reference_models`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from model_cells import made_config
from models_small import GRANITE, SIZES, built, expected_logits, our_logits, randomized, tokens_of
from planned_sizes import check_sizes
from reference_models import FAMILIES, reference
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks
from transformers import AutoModelForCausalLM

from srv.errors import ModelError
from srv.models import derive
from srv.models.checkpoints.reading import MAPPED, Reading
from srv.models.families.trees import native_tree
from srv.models.read import read_facts
from srv.models.unsupported import InvalidConfig, UnsupportedConfig

PAD = {"pad_token_id": 0}
SLIDING, FULL = "sliding_attention", "full_attention"
ROUTED = {"num_experts_per_tok": 3, "moe_intermediate_size": 20, "routed_scaling_factor": 1.7}
ERNIE = {**PAD, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 20}
DOTS = {**PAD, **ROUTED, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
GRANITE_MOE = {**PAD, **GRANITE, "num_local_experts": 7, "num_experts_per_tok": 3}
EXAONE = {**PAD, **ROUTED, "head_dim": 8, "num_experts": 8, "sliding_window": 5, "sliding_window_pattern": 2}
HUNYUAN = {**PAD, "head_dim": 8, "num_experts": 8, "moe_topk": 3}
NTK = {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 20.0, "factor": 1.0}
PHI = {**PAD, "num_local_experts": 6}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.4, 2.0, 3.0],
    "long_factor": [2.0, 8.0, 9.0, 9.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 256,
}
BAILING = {"head_dim": 8}
AFMOE = {
    **PAD,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "route_scale": 1.7,
    "sliding_window": 5,
    "global_attn_every_n_layers": 2,
    "mup_enabled": True,
}
DBRX: dict[str, Any] = {
    **PAD,
    "rope_theta": 500.0,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7},
    "ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 8, "moe_top_k": 3},
}
MIMO = {
    **PAD,
    **ROUTED,
    "num_attention_heads": 8,
    "head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "sliding_window": 5,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE),
    "ernie4_5_moe with biases, in some layers": (
        "ernie4_5_moe",
        {**ERNIE, "use_bias": True, "tie_word_embeddings": False, "moe_layer_interval": 2, "moe_layer_start_index": 0},
    ),
    "ernie4_5_moe without shared experts, in one layer": (
        "ernie4_5_moe",
        {**ERNIE, "moe_num_shared_experts": 0, "moe_layer_end_index": 1},
    ),
    "dots1": ("dots1", DOTS),
    "dots1 with windows, biases and groups": (
        "dots1",
        {
            **DOTS,
            "attention_bias": True,
            "norm_topk_prob": True,
            "n_group": 4,
            "topk_group": 2,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "granitemoe": ("granitemoe", GRANITE_MOE),
    "granitemoe with biases": ("granitemoe", {**GRANITE_MOE, "attention_bias": True, "tie_word_embeddings": True}),
    "granitemoeshared": ("granitemoeshared", {**GRANITE_MOE, "shared_intermediate_size": 24}),
    "granitemoeshared without a shared MLP": ("granitemoeshared", GRANITE_MOE),
    "exaone_moe": ("exaone_moe", EXAONE),
    "exaone_moe with stated kinds of layers, in groups": (
        "exaone_moe",
        {
            **EXAONE,
            "layer_types": [SLIDING, SLIDING, FULL],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", HUNYUAN),
    "hunyuan_v1_moe with a number of experts per layer, biases and a larger base": (
        "hunyuan_v1_moe",
        {**HUNYUAN, "moe_topk": [3, 1, 2], "attention_bias": True, "rope_parameters": NTK, "tie_word_embeddings": True},
    ),
    "phimoe": ("phimoe", PHI),
    "phimoe with biases, a window and long rope": (
        "phimoe",
        {
            **PHI,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 5,
            "rope_parameters": LONG,
            "original_max_position_embeddings": 256,
        },
    ),
    "afmoe": ("afmoe", AFMOE),
    "afmoe with stated kinds of layers and biases, and without a factor": (
        "afmoe",
        {
            **AFMOE,
            "mup_enabled": False,
            "attention_bias": True,
            "layer_types": [FULL, SLIDING, SLIDING],
            "num_dense_layers": 2,
        },
    ),
    "dbrx": ("dbrx", DBRX),
    "dbrx with weights of experts as they are": (
        "dbrx",
        {
            **DBRX,
            "attn_config": {"kv_n_heads": 3, "clip_qkv": 2.0},
            "ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": None},
        },
    ),
    "mimo_v2_flash": ("mimo_v2_flash", MIMO),
    "mimo_v2_flash with other kinds of layers, rotations and biases": (
        "mimo_v2_flash",
        {
            **MIMO,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "attention_bias": True,
            "attention_value_scale": None,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 40.0, "partial_rotary_factor": 1.0},
            },
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "bailing_moe": ("bailing_moe", BAILING),
    "bailing_moe with biases, and weights as they are": (
        "bailing_moe",
        {**BAILING, "use_qkv_bias": True, "norm_topk_prob": False, "num_shared_experts": None},
    ),
    "grok": ("git", {"head_dim": 8}),
    "grok without an MLP beside the experts, or a temperature": (
        "git",
        {"head_dim": 8, "residual_moe": False, "attn_temperature_len": 1000},
    ),
    "xverse": ("xverse", {}),
    "xverse with weights of a sum of 1": ("xverse", {"norm_topk_prob": True, "num_shared_experts": 1}),
    "xverse without experts": ("xverse", {"num_experts": None}),
    "bailing_moe_v2": ("bailing_moe_v2", BAILING),
    "bailing_moe_v2 without norms of heads, wholly rotated": (
        "bailing_moe_v2",
        {
            **BAILING,
            "use_qk_norm": False,
            "use_qkv_bias": True,
            "partial_rotary_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
SHARDED = [
    "ernie4_5_moe with biases, in some layers",
    "dots1 with windows, biases and groups",
    "granitemoeshared",
    "exaone_moe",
    "hunyuan_v1_moe with a number of experts per layer, biases and a larger base",
    "phimoe with biases, a window and long rope",
    "afmoe",
    "dbrx",
    "mimo_v2_flash",
    "bailing_moe with biases, and weights as they are",
    "bailing_moe_v2",
    "grok",
    "xverse",
]


def made(kind: str, fields: dict[str, Any]) -> Any:
    """A random model, in which corrections change which experts are chosen."""
    given = {**SIZES, "vocab_size": 98, **fields}
    torch.manual_seed(0)
    if kind in FAMILIES:
        return randomized(reference(kind, **given))
    config = made_config(kind, given)
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    with torch.no_grad():
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.normal_(0.0, 0.3)
    return model


def saved(case: str, folder: Path) -> Any:
    model = made(*CASES[case])
    model.save_pretrained(folder)
    return model


@every("case", CASES)
def test_logits_and_parameter_counts_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    tokens = tokens_of(model)
    ours = built(tmp_path, impl="srv")
    expected = expected_logits(model, tokens)
    torch.testing.assert_close(our_logits(ours, tokens), expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.3, "the logits are too flat for the comparison to mean anything"
    facts = read_facts(tmp_path)
    counted = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert counted >= sum(parameter.numel() for parameter in model.parameters())
    assert facts.parameters == derive.parameters(native_tree(facts.architecture, facts.config)) == counted
    check_sizes(tmp_path, ours)


@every(
    ("case", "names"),
    [
        ("ernie4_5_moe", ("model.mtp_linear_proj.0.weight", "model.mtp_block.0.mlp.up_proj.weight")),
        ("exaone_moe", ("mtp.fc.weight", "mtp.layers.0.input_layernorm.weight")),
        ("mimo_v2_flash", ("model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.enorm.weight")),
        ("bailing_moe_v2", ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight")),
    ],
)
def test_layers_that_predict_further_tokens_are_not_read(case: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """Their names are those of published checkpoints."""
    saved(case, tmp_path)
    before, path = read_facts(tmp_path), tmp_path / "model.safetensors"
    save_file({**load_file(path), **{name: torch.ones(3) for name in names}}, path)
    facts = read_facts(tmp_path)
    assert facts.parameters == before.parameters
    assert built(tmp_path, impl="srv").loaded_bytes() == facts.weight_bytes == before.weight_bytes


@every("case", SHARDED)
def test_ranks_compute_the_same_logits(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    tokens = tokens_of(model, 12)
    expected = our_logits(built(tmp_path), tokens)
    parts = on_ranks(
        2,
        lambda group, communicator: our_logits(built(tmp_path, group=group, communicator=communicator), tokens),
    )
    for logits in parts:
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
        assert torch.equal(logits, parts[0]), "ranks sample from different logits"


@every(
    ("name", "fields", "named"),
    [
        ("Ernie4_5_MoeForCausalLM", {"moe_gate_act": "sigmoid"}, "moe_gate_act = 'sigmoid'"),
        ("Ernie4_5_MoeForCausalLM", {"moe_k": 65}, "num_experts_per_tok = 65 of 64 experts"),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_interval": 0}, "moe_layer_interval = 0"),
        ("Dots1ForCausalLM", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("Dots1ForCausalLM", {"n_group": 3}, "8 experts cannot be in n_group = 3"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "8 experts cannot be in n_group = 3"),
        ("GraniteMoeForCausalLM", {"num_local_experts": 0}, "num_local_experts is 0, with which no model can be made"),
        ("ExaoneMoeForCausalLM", {"sliding_window_pattern": "LX"}, "sliding_window_pattern = 'LX' has other letters"),
        ("ExaoneMoeForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types = ['dense']"),
        ("HunYuanMoEV1ForCausalLM", {"use_cla": True}, "use_cla = True"),
        ("HunYuanMoEV1ForCausalLM", {"num_shared_expert": [1, 1, 2]}, "num_shared_expert = [1, 1, 2]"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 1]}, "[1, 1] are 2 values for 3 layers"),
        ("PhiMoEForCausalLM", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("PhiMoEForCausalLM", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ("PhiMoEForCausalLM", {"rope_scaling": {**LONG, "long_mscale": 1.3}}, "long_mscale = 1.3"),
        ("AfmoeForCausalLM", {"route_norm": False}, "route_norm = False"),
        ("AfmoeForCausalLM", {"score_func": "softmax"}, "score_func = 'softmax'"),
        ("AfmoeForCausalLM", {"sliding_window": None}, "sliding_window = None of layers of sliding_attention"),
        ("DbrxForCausalLM", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "ffn_config.moe_normalize_expert"),
        (
            "DbrxForCausalLM",
            {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}},
            "ffn_config.ffn_act_fn = {'name': 'gelu'}",
        ),
        ("MiMoV2FlashForCausalLM", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias = True"),
        ("MiMoV2FlashForCausalLM", {"hybrid_layer_pattern": [1, 1, 1]}, "hybrid_layer_pattern = [1, 1, 1]"),
        ("MiMoV2FlashForCausalLM", {"swa_num_key_value_heads": 2}, "swa_num_key_value_heads = 2"),
        ("BailingMoeForCausalLM", {"norm_head": True}, "norm_head = True"),
        ("BailingMoeForCausalLM", {"use_bias": True}, "use_bias = True"),
        ("BailingMoeV2ForCausalLM", {"score_function": "softmax"}, "score_function = 'softmax'"),
        (
            "BailingMoeV2ForCausalLM",
            {"moe_shared_expert_intermediate_size": 7},
            "moe_shared_expert_intermediate_size = 7",
        ),
        ("Grok1ForCausalLM", {"rope_type": "yarn_log"}, "rope_type = 'yarn_log'"),
        ("XverseForCausalLM", {"bias": True}, "bias = True"),
        ("XverseForCausalLM", {"num_experts": 2, "moe_top_k": 3}, "num_experts_per_tok = 3 of 2 experts"),
        ("Glm4MoeLiteForCausalLM", {"rope_interleave": False}, "rope_interleave = False"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense", "moe", "moe"]}, "mlp_layer_types = ['dense', 'moe'"),
    ],
)
def test_fields_that_are_not_implemented_are_refused_by_name(name: str, fields: dict[str, Any], named: str) -> None:
    base = {**SIZES, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3}
    base |= {"num_experts": 8, "moe_topk": 2} if name.startswith("HunYuan") else {}
    base |= {"num_experts": 8, "moe_intermediate_size": 20} if name.startswith("Bailing") else {}
    base |= {"num_experts_per_tok": 2} if name.startswith("Phi") else {}
    base |= {"num_local_experts": 8} if name.startswith("Grok") else {}
    if name.startswith("Glm"):
        del base["head_dim"]
    native_tree(name, base)
    with pytest.raises((InvalidConfig, UnsupportedConfig), match=re.escape(named)):
        native_tree(name, {**base, **fields})


def in_parts(folder: Path, ranks: int = 4) -> None:
    """Store experts as xAI stores those of Grok 2: each rank has a part of each matrix, and one file has the rest."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    path.unlink()
    experts = {name: each for name, each in weights.items() if ".experts." in name}
    rest = {name: each for name, each in weights.items() if name not in experts}
    save_file(rest, folder / "pytorch_model-00000-TP-common.safetensors")
    for rank in range(ranks):
        for number, end in enumerate(("w1", "w2", "w3"), 1):
            parts = {
                name: each.chunk(ranks, int(end == "w2"))[rank].contiguous()
                for name, each in experts.items()
                if name.endswith(f"{end}.weight")
            }
            save_file(parts, folder / f"pytorch_model-{number:05d}-TP-{rank:03d}.safetensors")


def test_parts_of_several_ranks_are_joined(tmp_path: Path) -> None:
    """As Grok 2 is published. Two ranks read their share of the parts, whichever files these are in."""
    model = saved("grok", tmp_path)
    before, tokens = read_facts(tmp_path), tokens_of(model, 12)
    expected = our_logits(built(tmp_path), tokens)
    in_parts(tmp_path)
    facts = read_facts(tmp_path)
    assert (facts.parameters, facts.weight_bytes) == (before.parameters, before.weight_bytes)
    for reading in (MAPPED, Reading(mapped=False)):
        assert torch.equal(our_logits(built(tmp_path, reading=reading), tokens), expected)
    shares = on_ranks(
        2, lambda group, communicator: our_logits(built(tmp_path, group=group, communicator=communicator), tokens)
    )
    for logits in shares:
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
    (tmp_path / "pytorch_model-00002-TP-001.safetensors").unlink()
    with pytest.raises(ModelError, match=r"the part of rank 1 of tensor \S+\.w2\.weight is missing"):
        read_facts(tmp_path)
