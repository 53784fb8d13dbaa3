"""Gemma: Llama with a GELU gate, norms that multiply by 1 + weight, and embeddings times the root of their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes
from srv.models.unsupported import refuse_unless

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # the latter in the first releases, for the same approximation
    "use_bidirectional_attention": (False,),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    sizes = decoder_sizes(config, reads=("hidden_act",))
    attention, mlp = (
        parts.attention(sizes, bias=bool(config["attention_bias"])),
        parts.mlp(sizes, False, "gelu_tanh_gated"),
    )
    layers, last = parts.pre_norm_layers(sizes, attention, mlp, wide=True), parts.last_norm(sizes, wide=True)
    return parts.decoder(sizes, layers, last, factor=sizes.hidden_size**0.5, factor_dtype="")


ARCHITECTURE = Architecture(
    name="GemmaForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
)
