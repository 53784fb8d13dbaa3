"""GPT-NeoX (Pythia): layers in parallel, each part with a norm of its own, and a quarter of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Order, Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import QKV, Permute, Rename, Skip, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.starcoder2 import NAMES


def tree(config: Mapping[str, Any]) -> Part:
    rope = {"partial_rotary_factor": config["rotary_pct"], "rope_theta": config["rotary_emb_base"]}
    sizes = layer_norm.sizes(
        {**config, **rope},
        names=NAMES,
        intermediate=int(config["intermediate_size"]),
        norm_eps=float(config["layer_norm_eps"]),
    )
    bias, activation = bool(config["attention_bias"]), layer_norm.activation(config, "hidden_act")
    attention = parts.attention(sizes, bias=bias)
    order: Order = "parallel" if config["use_parallel_residual"] else "sequence"
    return layer_norm.decoder(sizes, attention, parts.mlp(sizes, True, activation), order=order)


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    share = config["gguf_rotary_dim"] / config["head_dim"]
    return {**config, "rotary_pct": share, "rotary_emb_base": config["rope_parameters"]["rope_theta"]}


ARCHITECTURE = Architecture(
    name="GPTNeoXForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000.0,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    gguf=GGUFLayout(
        "gptneox",
        fields={
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
            "rope.dimension_count": "gguf_rotary_dim",
        },
        constants={"hidden_act": "gelu"},
        complete=_of_gguf,
    ),
    model_type="gpt_neox",
    weights=(
        Rename(
            prefix="gpt_neox.",
            names={
                "embed_in": "model.embed_tokens",
                "embed_out": "lm_head",
                "final_layer_norm": "model.norm",
                "layers.*.input_layernorm": "model.layers.*.input_layernorm",
                "layers.*.post_attention_layernorm": "model.layers.*.post_attention_layernorm",
                "layers.*.attention.query_key_value": "model.layers.*.self_attn.query_key_value",
                "layers.*.attention.dense": "model.layers.*.self_attn.o_proj",
                "layers.*.mlp.dense_h_to_4h": "model.layers.*.mlp.up_proj",
                "layers.*.mlp.dense_4h_to_h": "model.layers.*.mlp.down_proj",
            },
        ),
        # masks of old checkpoints
        Skip(("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias")),
        Split("self_attn.query_key_value", QKV),
        Permute("self_attn.query_key_value", "kv_heads"),
    ),
)
