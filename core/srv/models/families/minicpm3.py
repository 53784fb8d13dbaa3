"""MiniCPM 3: latent attention in a dense model, with constants that multiply embeddings, residuals and logits.

Torch-free. Rotary pairs are half the dimensions apart, as in Llama.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes
from srv.models.families.builders.deepseek import INNER_NORM_EPS
from srv.models.families.builders.latent import latent_attention, latent_sizes
from srv.models.layers.rope_config import rope_config
from srv.models.unsupported import UnsupportedConfig


def tree(config: Mapping[str, Any]) -> Part:
    heads, hidden, layers = (int(config[name]) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    fields = {**config, "head_dim": int(config["qk_rope_head_dim"]), "num_key_value_heads": heads}
    fields["v_head_dim"] = config.get("v_head_dim") or hidden // heads
    sizes, rope = decoder_sizes(fields), rope_config(fields, fields["head_dim"])
    attention = latent_attention(latent_sizes(fields, rope, INNER_NORM_EPS), rope, bias=bool(config["attention_bias"]))
    depth, base = config.get("scale_depth") or math.sqrt(layers), config.get("dim_model_base") or hidden
    if not base > 0:
        raise UnsupportedConfig(f"dim_model_base = {base} is not a positive number")
    mlp = parts.mlp(sizes, bool(config["mlp_bias"]))
    made = parts.pre_norm_layers(sizes, attention, mlp, factor=depth / math.sqrt(layers))
    return parts.decoder(sizes, made, factor=float(config["scale_emb"]), logits_divisor=hidden / base)


ARCHITECTURE = Architecture(
    name="MiniCPM3ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 73448,
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": None,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256.0,
    },
    model_type="minicpm3",
)
