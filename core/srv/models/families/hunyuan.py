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


def tree(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(config)
    attention = parts.attention(
        sizes, bias=bool(config["attention_bias"]), norms=parts.head_norms(sizes), norms_rotated=True
    )
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes)))


HEAD_NORMS = Rename(parts={"query_layernorm": "q_norm", "key_layernorm": "k_norm"})
ARCHITECTURE = Architecture(
    name="HunYuanDenseV1ForCausalLM",
    tree=tree,
    defaults={**LLAMA_DEFAULTS, "vocab_size": 290943, "rms_norm_eps": 1e-5, "eos_token_id": 2},
    model_type="hunyuan_v1_dense",
    weights=(HEAD_NORMS,),
)
