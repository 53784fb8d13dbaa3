"""Nemotron-H: each layer is one of Mamba-2, attention without positions, an MLP and experts. Torch-free.

No MLP has a gate, and no expert. Nemotron 3 Super has experts of a smaller hidden size than the model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Linear, MoE, Part
from srv.models.blueprint.recurrent import StateSpace
from srv.models.checkpoints.gguf_layout import GGUFLayout, layer_names, state_space_names
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes
from srv.models.families.builders.layer_types import grouped_routing
from srv.models.families.builders.mamba import GGUF_FIELDS, check_step_limit, mamba_of_gguf, state_space
from srv.models.layers.recurrent_sizes import ScanSizes, StateSpaceSizes
from srv.models.unsupported import UnsupportedConfig, refuse_unless

MIXER = "mixer"  # the name of the part of a layer, whatever it is
ATTENTION, RECURRENT, DENSE, SPARSE = "full_attention", "linear_attention", "mlp", "moe"
_LETTERS = {"M": RECURRENT, "*": ATTENTION, "-": DENSE, "E": SPARSE}
_FORMER_KINDS = {"mamba": RECURRENT, "attention": ATTENTION}
_SUPPORTED = {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu", "swish"), "n_shared_experts": (1,)}


def tree(config: Mapping[str, Any]) -> Part:
    """As in the published implementation, no time step is clamped.

    transformers raises those of prompts to `time_step_min`, but not those of tokens that follow.
    """
    refuse_unless(config, _SUPPORTED)
    kinds = _kinds(config)
    sizes = decoder_sizes(
        {
            **config,
            "num_hidden_layers": len(kinds),
            "rms_norm_eps": config["layer_norm_epsilon"],
            "tie_word_embeddings": False,
        },
        reads=("num_local_experts",),
    )
    bias = bool(config["mlp_bias"])
    each: dict[str, Part] = {
        RECURRENT: _mamba(config, sizes),
        ATTENTION: parts.attention(sizes, rotated=False, name=MIXER),
        DENSE: parts.mlp(sizes, bias, "relu2", name=MIXER),
    }
    if SPARSE in kinds:
        each[SPARSE] = _experts(config, sizes, bias)
    return parts.decoder(sizes, parts.single_part_layers(sizes, [each[kind] for kind in kinds]))


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Of each layer: by name, or by the letters of a pattern."""
    stated, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if stated:
        field, kinds = "layers_block_type", [_FORMER_KINDS.get(kind, kind) for kind in stated]
    elif isinstance(pattern, str):
        field, kinds = "hybrid_override_pattern", [_LETTERS.get(letter, letter) for letter in pattern]
    else:
        raise UnsupportedConfig("config.json lacks hybrid_override_pattern")
    if unknown := sorted(set(kinds) - set(_LETTERS.values())):
        raise UnsupportedConfig(f"{field} contains the unknown {', '.join(map(repr, unknown))}")
    if ATTENTION not in kinds:
        raise UnsupportedConfig(f"{field} has no layer of {ATTENTION}")
    return kinds


def _mamba(config: Mapping[str, Any], sizes: Sizes) -> StateSpace:
    check_step_limit(config["time_step_limit"])
    heads, groups = int(config["mamba_num_heads"]), int(config["n_groups"])
    if groups < 1 or heads % groups:
        raise UnsupportedConfig(f"{heads} heads are not a multiple of {groups} groups (mamba_num_heads, n_groups)")
    scan = ScanSizes(heads, groups, int(config["mamba_head_dim"]), int(config["ssm_state_size"]))
    bias = bool(config["use_bias"])
    mamba = StateSpaceSizes(scan, int(config["conv_kernel"]), bool(config["use_conv_bias"]), bias, bias)
    return state_space(mamba, sizes.hidden_size, sizes.norm_eps, name=MIXER)


def _experts(config: Mapping[str, Any], sizes: Sizes, bias: bool) -> MoE:
    """`bias`: of the shared expert and of what projects to and from the hidden size of the others, which have none."""
    count, inner = int(config["n_routed_experts"]), int(config["moe_intermediate_size"])
    moe = parts.mixture(sizes, count, inner, grouped_routing(config, count), activation="relu2", name=MIXER)
    shared = int(config["moe_shared_expert_intermediate_size"])
    moe = dataclasses.replace(moe, shared=parts.mlp(sizes, bias, "relu2", inner=shared, name="shared_experts"))
    small, hidden = config["moe_latent_size"], sizes.hidden_size
    if small is None:
        return moe
    return dataclasses.replace(
        moe,
        experts=dataclasses.replace(moe.experts, hidden=int(small)),
        to_experts=Linear({"fc1_latent_proj": int(small)}, hidden, bias),
        from_experts=Linear({"fc2_latent_proj": hidden}, int(small), bias, split="sum"),
    )


# Of published files and of those that transformers saves.
_PREFIX = {"backbone": "model"}
_SIZES_OF_GGUF = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
}


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """A layer without key heads and without an MLP is one of Mamba-2.

    The rows of queries and keys are in the order of rotary pairs, though nothing rotates them: it is that of both.
    """
    kinds = [
        ATTENTION if heads else DENSE if inner else RECURRENT
        for heads, inner in zip(config["gguf_kv_heads"], config["gguf_inner_sizes"], strict=True)
    ]
    made = mamba_of_gguf(config)
    sizes = {new: made.pop(old) for new, old in _SIZES_OF_GGUF.items()}
    return {**made, **sizes, "layers_block_type": kinds}


ARCHITECTURE = Architecture(
    name="NemotronHForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "conv_kernel": 4,
        "n_groups": 8,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "ssm_state_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "time_step_limit": None,
    },
    gguf=GGUFLayout(
        "nemotron_h",
        weights=(
            state_space_names(MIXER),
            layer_names(
                {
                    "attn_norm": "norm",
                    "attn_q": f"{MIXER}.q_proj",
                    "attn_k": f"{MIXER}.k_proj",
                    "attn_v": f"{MIXER}.v_proj",
                    "attn_output": f"{MIXER}.o_proj",
                    "ffn_up": f"{MIXER}.up_proj",
                    "ffn_down": f"{MIXER}.down_proj",
                }
            ),
        ),
        fields={
            **GGUF_FIELDS,
            "feed_forward_length": "gguf_inner_sizes",
        },
        optional_fields={
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        },
        complete=_of_gguf,
    ),
    model_type="nemotron_h",
    weights=(Rename({"model.embeddings": "model.embed_tokens", "model.norm_f": "model.norm"}, parts=_PREFIX),),
    names={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    former_names={
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit",
    },
    runs_through_transformers=False,
)
