"""StableLM: Llama with LayerNorm, rotary embeddings of a part of each head, and optionally parallel layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Order, Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.unsupported import refuse_unless

NAMES = {
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "context": ("max_position_embeddings",),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"hidden_act": ("silu",)})
    sizes = layer_norm.sizes(
        config,
        names=NAMES,
        intermediate=int(config["intermediate_size"]),
        kv_heads=int(config["num_key_value_heads"]),
        norm_eps=float(config["layer_norm_eps"]),
    )
    norms, bias = layer_norm.head_norms(sizes) if config["qk_layernorm"] else None, bool(config["use_qkv_bias"])
    attention = parts.attention(sizes, bias=bias, output_bias=False, norms=norms)
    parallel = bool(config["use_parallel_residual"])
    order: Order = "parallel" if parallel else "sequence"
    return layer_norm.decoder(sizes, attention, parts.mlp(sizes), order=order, separate_norms=not parallel)


ARCHITECTURE = Architecture(
    name="StableLmForCausalLM",
    tree=tree,
    defaults={
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "qk_layernorm": False,
        "tie_word_embeddings": False,
        "use_parallel_residual": False,
        "use_qkv_bias": False,
    },
    gguf=GGUFLayout(
        "stablelm",
        fields={
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        present={"use_qkv_bias": "blk.0.attn_q.bias"},
    ),
    runs_through_transformers=False,
)
