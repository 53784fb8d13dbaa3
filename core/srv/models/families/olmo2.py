"""OLMo 2: norms follow attention and MLP, and precede neither; those of queries and keys span all heads.

Torch-free. (Walsh et al. 2024, arXiv:2501.00656)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import HEAD_NORM_NAMES, OUTPUT_NORM_NAMES, GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes
from srv.models.families.builders.sandwich import sandwich_decoder

OLMO_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config), bool(config["attention_bias"])
    attention = parts.attention(sizes, bias=bias, norms=parts.joint_norms(sizes))
    return sandwich_decoder(sizes, attention, parts.mlp(sizes), before=False)


ARCHITECTURE = Architecture(
    name="Olmo2ForCausalLM",
    tree=tree,
    defaults=OLMO_DEFAULTS,
    gguf=GGUFLayout("olmo2", weights=(OUTPUT_NORM_NAMES, HEAD_NORM_NAMES)),
)
