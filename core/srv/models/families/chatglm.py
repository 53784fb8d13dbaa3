"""ChatGLM 2 and 3, and GLM-4 of 2024 as first published: the computation of `glm`, with names of its own.

Published with its code; transformers has no class. ChatGLM-6B, the first one, has the same name and is refused by its
fields, as are vision models (GLM-4V).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import GATE_UP, QKV, PermuteRotary, Rename, Skip, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes
from srv.models.unsupported import refuse_unless

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "position_encoding_2d": (False,),
    "vision_config": (),
    "rmsnorm": (True,),
    "post_layer_norm": (True,),
    "multi_query_attention": (True,),
    "apply_residual_connection_post_layernorm": (False,),
    "pre_seq_len": (),
    "quantization_bit": (0,),
}
BASE = 10000.0  # of RoPE, before `rope_ratio`
ROTATED = 0.5  # of each head


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    rope = {"rope_theta": BASE * float(config["rope_ratio"]), "partial_rotary_factor": ROTATED}
    sizes, bias = decoder_sizes({**config, **rope}, reads=("partial_rotary_factor",)), bool(config["add_bias_linear"])
    attention = parts.attention(sizes, bias=bias or bool(config["add_qkv_bias"]), output_bias=bias)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes, bias)))


def adjacent_dims(config: Mapping[str, Any]) -> int:
    """The dimensions per head that are rotated in adjacent pairs; without `original_rope`, the pairs are halves."""
    return int(config["head_dim"] * ROTATED) if config["original_rope"] else 0


ARCHITECTURE = Architecture(
    name="ChatGLMModel",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 65024,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 28,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_ratio": 1.0,
        "original_rope": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "eos_token_id": 2,
    },
    model_type="chatglm",
    names={
        "padded_vocab_size": "vocab_size",
        "ffn_hidden_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "multi_query_group_num": "num_key_value_heads",
        "kv_channels": "head_dim",
        "seq_length": "max_position_embeddings",
        "layernorm_epsilon": "rms_norm_eps",
    },
    weights=(
        Rename(
            prefix="transformer.",
            names={
                "embedding.word_embeddings": "model.embed_tokens",
                "output_layer": "lm_head",
                "encoder.final_layernorm": "model.norm",
                "encoder.layers.*.input_layernorm": "model.layers.*.input_layernorm",
                "encoder.layers.*.post_attention_layernorm": "model.layers.*.post_attention_layernorm",
                "encoder.layers.*.self_attention.query_key_value": "model.layers.*.self_attn.query_key_value",
                "encoder.layers.*.self_attention.dense": "model.layers.*.self_attn.o_proj",
                "encoder.layers.*.mlp.dense_h_to_4h": "model.layers.*.mlp.gate_up_proj",
                "encoder.layers.*.mlp.dense_4h_to_h": "model.layers.*.mlp.down_proj",
            },
        ),
        Skip(("transformer.rotary_pos_emb.inv_freq",)),
        Split("self_attn.query_key_value", QKV),
        Split("mlp.gate_up_proj", GATE_UP),
        PermuteRotary(adjacent_dims),
    ),
    published_names=("ChatGLMForConditionalGeneration",),
)
