"""Phi-3.5-MoE, and the smaller Phi-mini-MoE: layer norms, experts chosen by SparseMixer, biases and LongRoPE.

Torch-free. LongRoPE is served with one of its two lists of factors (`srv.models.layers.rope_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, one_window
from srv.models.layers.moe_config import JITTER, Routing
from srv.models.layers.rope_config import rope_parameters
from srv.models.unsupported import UnsupportedConfig, refuse_unless


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"router_jitter_noise": (JITTER,), "num_experts_per_tok": (2,)})
    sizes = decoder_sizes(_with_attention_factor(config), reads=("num_local_experts",))
    count, routing = int(config["num_local_experts"]), Routing(int(config["num_experts_per_tok"]), "sparse_mixer")
    attention = parts.attention(sizes, bias=bool(config["attention_bias"]), window=one_window(config))
    experts = parts.mixture(sizes, count, sizes.intermediate_size, routing)
    return layer_norm.decoder(sizes, attention, experts, output_bias=bool(config["lm_head_bias"]))


def _with_attention_factor(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the factor of cosines and sines under the name that LongRoPE has in other models."""
    rope = rope_parameters(config)
    if rope["rope_type"] == "default":
        return dict(config)
    short, long = rope.get("short_mscale"), rope.get("long_mscale")
    if rope["rope_type"] != "longrope" or short is None or short != long:
        reason = f"RoPE type {rope['rope_type']!r} with short_mscale = {short!r} and long_mscale = {long!r}"
        raise UnsupportedConfig(f"{reason} is not implemented natively")
    return {**config, "rope_scaling": None, "rope_parameters": {**rope, "attention_factor": short}}


ARCHITECTURE = Architecture(
    name="PhiMoEForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "eos_token_id": 2,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "lm_head_bias": False,
        "sliding_window": None,
    },
    model_type="phimoe",
    weights=(Rename(parts={"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}),),
    published_names=("PhimoeForCausalLM",),
)
