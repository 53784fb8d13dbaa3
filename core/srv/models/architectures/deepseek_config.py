"""DeepSeek-V2 and V3: the facts of decoders with latent attention and, from some layer on, a mixture of experts.

Torch-free. Owns what both have in common; the file of each one says how it chooses experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from srv.models.architectures import parts
from srv.models.architectures.decoder_config import DecoderConfig, decoder_config
from srv.models.architectures.described import Described
from srv.models.architectures.latent_sizes import LatentSizes, latent_sizes
from srv.models.blueprint import Layer, Linear, Norm, Part
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.latent_parts import GatedNorm
from srv.models.layers.moe_config import COUNT_FIELDS, MoEConfig, Routing
from srv.models.layers.rope_config import UnsupportedConfig, refuse_unless

ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
INNER_NORM_EPS = 1e-6  # of the norms of compressed vectors, whatever rms_norm_eps is


def rotary_dims(config: Mapping[str, Any]) -> int:
    """The dimensions per head whose rotary pairs are adjacent in checkpoints."""
    return int(config["qk_rope_head_dim"])


WEIGHTS = (PermuteRotary(rotary_dims),)
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)
# Only these values of fields that change the computation are implemented; None is as if the field were left out.
SUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"mlp_layer_types": (), "moe_layer_freq": (1,), "mlp_bias": (False,), "rope_interleave": (True,)}
)


@dataclass(frozen=True)
class DeepseekConfig(Described):
    """`decoder`: everything besides attention; its heads are those of the rotary part. `attention`: of every layer.

    `indexed`: whether each layer has an indexer, if `attention` has one; without, it uses that of a layer before it.
    `gate_rank`: the inner size of the gates of norms (`srv.models.latent_parts.GatedNorm`), 0 if norms have none.
    """

    decoder: DecoderConfig
    attention: LatentSizes
    indexed: tuple[bool, ...] = ()
    gate_rank: int = 0

    def has_indexer(self, index: int) -> bool:
        return bool(self.indexed) and self.indexed[index]

    def gated_norms(self, index: int) -> tuple[str, ...]:
        """The norms of a layer that have a gate: if any have, the first one and that of a mixture of experts."""
        if not self.gate_rank:
            return ()
        return (ATTENTION_NORM,) if self.decoder.moe_of(index) is None else (ATTENTION_NORM, MLP_NORM)

    @functools.cached_property
    def tree(self) -> Part:
        sizes = self.decoder
        kinds = [(self.has_indexer(index), sizes.moe_of(index)) for index in range(sizes.layers)]
        return parts.decoder(sizes, parts.layers(kinds, self._layer), parts.last_norm(sizes))

    def _layer(self, index: int) -> Layer:
        sizes, gated = self.decoder, self.gated_norms(index)
        before, between = (self._norm(name, name in gated) for name in (ATTENTION_NORM, MLP_NORM))
        mixer = self.attention.part(sizes.rope, self.has_indexer(index))
        return Layer((before,), (mixer,), (between,), parts.feed_forward(sizes, sizes.moe_of(index)))

    def _norm(self, name: str, is_gated: bool) -> Norm:
        hidden, eps, rank = self.decoder.hidden_size, self.decoder.norm_eps, self.gate_rank
        if not is_gated:
            return Norm(hidden, eps, adds=True, name=name)
        down, up = Linear({"mlp.fc1": rank}, hidden), Linear({"mlp.fc2": hidden}, rank)
        return GatedNorm(hidden, eps, adds=True, down=down, up=up, name=name)


def deepseek_config(
    config: Mapping[str, Any],
    routing: Callable[[Mapping[str, Any]], Routing],
    sparse: Callable[[Mapping[str, Any], int], tuple[bool, ...]] | None = None,
) -> DeepseekConfig:
    """From fields with all defaults filled in. Raises UnsupportedConfig with the field that is not implemented.

    `routing(config)`: how experts are chosen; it is called if a layer has any. `sparse(config, layers)`: which layers
    have experts; None: those from `first_k_dense_replace` on.
    """
    refuse_unless(config, SUPPORTED)
    rope_dim, heads = int(config["qk_rope_head_dim"]), int(config["num_attention_heads"])
    fields = {**config, "head_dim": rope_dim, "num_key_value_heads": heads}
    decoder = decoder_config(fields, COUNT_FIELDS)
    attention = latent_sizes(config, decoder.rope, INNER_NORM_EPS)
    moe_layers = (sparse or sparse_from)(config, decoder.layers)
    if any(moe_layers):
        decoder = decoder.replace(moe=_experts(config, routing(config)), moe_layers=moe_layers)
    return DeepseekConfig(decoder, attention)


def sparse_from(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: from `first_k_dense_replace` on."""
    dense = int(config.get("first_k_dense_replace") or 0)
    return tuple(index >= dense for index in range(layers))


def _experts(config: Mapping[str, Any], routing: Routing) -> MoEConfig:
    count, size = int(config["n_routed_experts"]), int(config["moe_intermediate_size"])
    groups, used = routing.groups, routing.top_groups
    if groups < 1 or count % groups or not 1 <= used <= groups:
        raise UnsupportedConfig(f"{count} experts cannot be in n_group = {groups} groups, of which topk_group = {used}")
    if not 1 <= routing.top_k <= count // groups * used:
        most = count // groups * used
        raise UnsupportedConfig(f"num_experts_per_tok = {routing.top_k} is not between 1 and {most} experts")
    shared = int(config.get("n_shared_experts") or 0) * size
    return MoEConfig(count, size, routing, shared, shared="shared_experts")


def groups_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """The number of groups of experts, and of those that a token uses."""
    return int(config["n_group"] or 1), int(config["topk_group"] or 1)
