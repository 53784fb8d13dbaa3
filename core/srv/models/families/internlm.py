"""InternLM 2 and 3: Llama with names and a fused projection of its own (2), or with biases by two fields (3).

Published with their code. Of InternLM 3, transformers has the configuration alone, for its class of Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import QKV, Permute, Rename, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes


def internlm2(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(config)
    attention = parts.attention(sizes, bias=bool(config["bias"]))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes)))


def internlm3(config: Mapping[str, Any]) -> Part:
    """`bias`: of the projection of attention's result, and of the MLP."""
    sizes, bias = decoder_sizes(config), bool(config["mlp_bias"])
    attention = parts.attention(sizes, bias=bool(config["attention_bias"]), output_bias=bias)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes, bias)))


INTERNLM2 = Architecture(
    name="InternLM2ForCausalLM",
    tree=internlm2,
    defaults={
        **DEFAULTS,
        "vocab_size": 103168,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bias": True,
        "eos_token_id": 2,
    },
    weights=(
        Rename(
            {
                "model.tok_embeddings": "model.embed_tokens",
                "output": "lm_head",
                "model.layers.*.attention_norm": "model.layers.*.input_layernorm",
                "model.layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
                "model.layers.*.attention.wqkv": "model.layers.*.self_attn.query_key_value",
                "model.layers.*.attention.wo": "model.layers.*.self_attn.o_proj",
                "model.layers.*.feed_forward.w1": "model.layers.*.mlp.gate_proj",
                "model.layers.*.feed_forward.w2": "model.layers.*.mlp.down_proj",
                "model.layers.*.feed_forward.w3": "model.layers.*.mlp.up_proj",
            }
        ),
        Split("self_attn.query_key_value", QKV),
        Permute("self_attn.query_key_value", "kv_heads"),
    ),
)
INTERNLM3 = Architecture(
    name="InternLM3ForCausalLM",
    tree=internlm3,
    defaults={
        **DEFAULTS,
        "vocab_size": 128512,
        "hidden_size": 4096,
        "intermediate_size": 10240,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    names={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
