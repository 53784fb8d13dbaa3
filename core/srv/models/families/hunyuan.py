"""Hunyuan without experts: norms of heads after the rotation. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.llama import LLAMA_DEFAULTS
from srv.models.layers.rope_config import rope_parameters


def hunyuan(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(with_stretched_base(config))
    attention = parts.attention(
        sizes, bias=bool(config["attention_bias"]), norms=parts.head_norms(sizes), norms_rotated=True
    )
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes)))


def with_stretched_base(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with its base of RoPE times alpha^(d / (d - 2)), where d is the size of a head.

    Checkpoints call this "dynamic" scaling, but with an `alpha`, frequencies depend on no length.
    """
    parameters = rope_parameters(config)
    if parameters["rope_type"] != "dynamic" or not parameters.get("alpha"):
        return config
    dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    theta = parameters["rope_theta"] * float(parameters["alpha"]) ** (dim / (dim - 2))
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


HEAD_NORMS = Rename(
    {
        "model.layers.*.self_attn.query_layernorm": "model.layers.*.self_attn.q_norm",
        "model.layers.*.self_attn.key_layernorm": "model.layers.*.self_attn.k_norm",
    }
)
DENSE = Architecture(
    name="HunYuanDenseV1ForCausalLM",
    tree=hunyuan,
    defaults={**LLAMA_DEFAULTS, "vocab_size": 290943, "rms_norm_eps": 1e-5, "eos_token_id": 2},
    model_type="hunyuan_v1_dense",
    weights=(HEAD_NORMS,),
)
