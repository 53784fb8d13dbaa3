"""OLMo 2: norms follow attention and MLP, and precede neither; those of queries and keys span all heads.

Torch-free. (Walsh et al. 2024, arXiv:2501.00656)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DEFAULTS, decoder_config
from srv.models.architectures.sandwich_config import SandwichConfig
from srv.models.checkpoints.gguf_layout import HEAD_NORM_NAMES, OUTPUT_NORM_NAMES, GGUFLayout

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


def make_config(config: Mapping[str, Any]) -> SandwichConfig:
    bias = bool(config["attention_bias"])
    decoder = decoder_config(config).replace(qkv_bias=bias, output_bias=bias, qk_norm=True, wide_qk_norm=True)
    return SandwichConfig(decoder, before=False)


ARCHITECTURE = Architecture(
    name="Olmo2ForCausalLM",
    make_config=make_config,
    defaults=OLMO_DEFAULTS,
    gguf=GGUFLayout("olmo2", weights=(OUTPUT_NORM_NAMES, HEAD_NORM_NAMES)),
)
