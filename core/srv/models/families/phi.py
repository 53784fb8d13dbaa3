"""Phi 1 and 2: parallel layers with one norm, biases everywhere, and a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.starcoder2 import NAMES
from srv.models.unsupported import refuse_unless


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"qk_layernorm": (False,)})
    sizes = layer_norm.sizes(
        config,
        names=NAMES,
        intermediate=int(config["intermediate_size"]),
        kv_heads=int(config["num_key_value_heads"]),
        norm_eps=float(config["layer_norm_eps"]),
    )
    return layer_norm.decoder(
        sizes,
        parts.attention(sizes, bias=True),
        parts.mlp(sizes, True, layer_norm.activation(config, "hidden_act")),
        order="parallel",
        separate_norms=False,
        output_bias=True,
    )


ARCHITECTURE = Architecture(
    name="PhiForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    gguf=GGUFLayout(
        "phi2",
        fields={"attention.layer_norm_epsilon": "layer_norm_eps"},
        sizes={"intermediate_size": ("blk.0.ffn_up.weight", 0)},
        constants={"hidden_act": "gelu_new"},
    ),
    weights=(
        Rename(
            {
                "model.final_layernorm": "model.norm",
                "model.layers.*.self_attn.dense": "model.layers.*.self_attn.o_proj",
                "model.layers.*.mlp.fc1": "model.layers.*.mlp.up_proj",
                "model.layers.*.mlp.fc2": "model.layers.*.mlp.down_proj",
            }
        ),
    ),
)
