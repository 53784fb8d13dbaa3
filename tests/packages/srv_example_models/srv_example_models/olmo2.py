"""OLMo 2: the facts of a decoder that norms what attention and MLP return, and all queries and keys of a token at once.

Torch-free; `olmo2_layers` computes. (Walsh et al. 2024, arXiv:2501.00656)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture, DividedSizes
from srv.models.architectures.decoder_config import DEFAULTS, DecoderConfig, decoder_config


class Olmo2Config(DecoderConfig):
    """The sizes of a decoder, whose two norms per layer are as large as those of Llama."""

    __slots__ = ()

    @property
    def parameters(self) -> int:
        """The norms of queries and keys have one weight per element of all heads."""
        return super().parameters + self.layers * (self.heads + self.kv_heads) * self.head_dim

    @property
    def divided(self) -> DividedSizes | None:
        """The norms of queries and keys need all heads, so the heads cannot be divided among ranks."""
        return None


def make_config(config: Mapping[str, Any]) -> Olmo2Config:
    bias = bool(config["attention_bias"])
    return Olmo2Config(*decoder_config(config)._replace(qkv_bias=bias, output_bias=bias))


ARCHITECTURE = Architecture(
    name="Olmo2ForCausalLM",
    make_config=make_config,
    defaults={
        **DEFAULTS,
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    },
    layers="srv_example_models.olmo2_layers:Olmo2",
)
