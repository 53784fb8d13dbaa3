"""OLMo 3: the facts of a decoder that norms what attention and MLP return, and all queries and keys of a token at once.

Three of four layers attend to a sliding window. Torch-free; `olmo3_layers` computes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srv.models.architectures import parts
from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DEFAULTS, DecoderConfig, decoder_config, windows_of_pattern
from srv.models.architectures.described import Described
from srv.models.blueprint import Decoder, Layer, Norm
from srv.models.layers.rope_config import UnsupportedConfig

KINDS = ("full_attention", "sliding_attention")
NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Olmo3Config(Described):
    """`decoder`: the sizes, with norms of queries and keys over all heads, which cannot be divided among ranks."""

    decoder: DecoderConfig

    @functools.cached_property
    def tree(self) -> Decoder:
        return parts.decoder(
            self.decoder, parts.layers(self.decoder.windows, self._layer), parts.last_norm(self.decoder)
        )

    def _layer(self, index: int) -> Layer:
        sizes = self.decoder
        after, last = (Norm(sizes.hidden_size, sizes.norm_eps, name=name) for name in NORMS)
        return Layer((), (parts.attention(sizes, index),), (after,), parts.feed_forward(sizes, None), (last,))


def make_config(config: Mapping[str, Any]) -> Olmo3Config:
    base, bias = decoder_config(_of_one_rope(config)), bool(config["attention_bias"])
    windows = windows_of_pattern(config, base.layers)
    return Olmo3Config(base.replace(qkv_bias=bias, output_bias=bias, windows=windows, qk_norm=True, wide_qk_norm=True))


def _of_one_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the rotary embedding of all layers, which transformers has for each kind of them."""
    given = config.get("rope_parameters") or {}
    ropes = [given[kind] for kind in KINDS if kind in given]
    if any(rope != ropes[0] for rope in ropes):
        raise UnsupportedConfig("rope_parameters of layers with a window that differ from those of the others")
    return {**config, "rope_parameters": ropes[0] if ropes else given}


ARCHITECTURE = Architecture(
    name="Olmo3ForCausalLM",
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
        "rope_theta": 500000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "eos_token_id": 50279,
    },
    layers="srv_example_models.olmo3_layers:Olmo3",
)
