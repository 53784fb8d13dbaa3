"""StarCoder 2: layers in sequence with biases, few key heads, rotary embeddings and a window in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import one_window

NAMES = {
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "context": ("max_position_embeddings",),
}


def tree(config: Mapping[str, Any]) -> Part:
    sizes = layer_norm.sizes(
        config,
        names=NAMES,
        intermediate=int(config["intermediate_size"]),
        kv_heads=int(config["num_key_value_heads"]),
        norm_eps=float(config["norm_epsilon"]),
    )
    bias, activation = bool(config["use_bias"]), layer_norm.activation(config, "hidden_act")
    attention = parts.attention(sizes, bias=bias, window=one_window(config))
    return layer_norm.decoder(sizes, attention, parts.mlp(sizes, bias, activation))


ARCHITECTURE = Architecture(
    name="Starcoder2ForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "eos_token_id": 50256,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    gguf=GGUFLayout(
        "starcoder2",
        fields={"attention.layer_norm_epsilon": "norm_epsilon"},
        constants={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        present={"use_bias": "blk.0.ffn_up.bias"},
    ),
    weights=(
        Rename(
            {
                "model.layers.*.mlp.c_fc": "model.layers.*.mlp.up_proj",
                "model.layers.*.mlp.c_proj": "model.layers.*.mlp.down_proj",
            }
        ),
    ),
)
