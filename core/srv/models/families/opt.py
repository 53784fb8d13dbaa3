"""OPT: layers in sequence with biases, and learned positions. 350M, whose norms follow its layers, is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.starcoder2 import NAMES
from srv.models.unsupported import refuse_unless

FIRST_POSITION = 2
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "do_layer_norm_before": (True,),
    "_remove_final_layer_norm": (False,),
    "layer_norm_elementwise_affine": (True,),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {**SUPPORTED, "word_embed_proj_dim": (config["hidden_size"],)})
    sizes = layer_norm.sizes(config, names=NAMES, intermediate=int(config["ffn_dim"]), norm_eps=1e-5, rotary=False)
    bias, positions = bool(config["enable_bias"]), layer_norm.first_set_field(config, NAMES["context"])
    return layer_norm.decoder(
        sizes,
        parts.attention(sizes, bias=bias),
        parts.mlp(sizes, bias, layer_norm.activation(config, "activation_function")),
        before=(layer_norm.learned_positions(sizes, positions, FIRST_POSITION),),
    )


ARCHITECTURE = Architecture(
    name="OPTForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "enable_bias": True,
    },
    weights=(
        Rename(
            prefix="model.decoder.",
            names={
                "embed_tokens": "model.embed_tokens",
                "embed_positions": "model.embed_positions",
                "final_layer_norm": "model.norm",
                "layers.*.self_attn.q_proj": "model.layers.*.self_attn.q_proj",
                "layers.*.self_attn.k_proj": "model.layers.*.self_attn.k_proj",
                "layers.*.self_attn.v_proj": "model.layers.*.self_attn.v_proj",
                "layers.*.self_attn.out_proj": "model.layers.*.self_attn.o_proj",
                "layers.*.self_attn_layer_norm": "model.layers.*.input_layernorm",
                "layers.*.final_layer_norm": "model.layers.*.post_attention_layernorm",
                "layers.*.fc1": "model.layers.*.mlp.up_proj",
                "layers.*.fc2": "model.layers.*.mlp.down_proj",
            },
        ),
    ),
)
