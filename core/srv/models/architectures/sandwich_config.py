"""The configuration of decoders whose attention and MLP have a norm after them: Gemma, GLM-4, OLMo.

Torch-free. Owns the switches in which these differ.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from srv.models.architectures import parts
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.described import Described
from srv.models.blueprint import Activation, Layer, Norm, Part
from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig, rope_config

KINDS = ("full_attention", "sliding_attention")
GatedActivation: TypeAlias = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class SandwichConfig(Described):
    """`decoder`: the sizes, with the rotary embedding of layers with full attention.

    `local_rope`: that of layers with a window; None for the same. `before`: attention and MLP each have a norm before
    them as well. `unit_offset`: norms multiply by 1 + weight, and `decoder.embedding_multiplier`, which is not rounded
    yet, is rounded to the model's dtype. `activation`: of the gated MLP.
    """

    decoder: DecoderConfig
    local_rope: RopeConfig | None = None
    before: bool = True
    unit_offset: bool = False
    activation: GatedActivation = "silu"

    @functools.cached_property
    def tree(self) -> Part:
        sizes = self.decoder
        made = parts.layers(list(zip(sizes.windows, sizes.rotated, strict=True)), self._layer)
        return parts.decoder(sizes, made, parts.last_norm(sizes, wide=self.unit_offset), factor_dtype="")

    def _layer(self, index: int) -> Layer:
        sizes = self.decoder
        rope = None if sizes.windows[index] is None else self.local_rope
        attention = parts.attention(sizes, index, rope=rope, wide=self.unit_offset)
        activation: Activation = "silu_gated" if self.activation == "silu" else "gelu_tanh_gated"
        mlp = parts.mlp(sizes.hidden_size, sizes.intermediate_size, sizes.mlp_bias, activation)
        before, between, after = [], [self._norm(parts.BEFORE_MLP)], self._norm("post_feedforward_layernorm")
        if self.before:
            before.append(self._norm(parts.BEFORE_MIXER, adds=True))
            between.append(self._norm("pre_feedforward_layernorm", adds=True))
        return Layer(tuple(before), (attention,), tuple(between), mlp, (after,))

    def _norm(self, name: str, adds: bool = False) -> Norm:
        return Norm(self.decoder.hidden_size, self.decoder.norm_eps, adds=adds, wide=self.unit_offset, name=name)


def attention_scale(config: Mapping[str, Any]) -> float:
    """From `query_pre_attn_scalar`."""
    scalar = float(config["query_pre_attn_scalar"])
    if not scalar > 0:
        raise UnsupportedConfig(f"query_pre_attn_scalar = {scalar} is not a positive number")
    return float(scalar**-0.5)


def with_rope_of(config: Mapping[str, Any], kind: str, theta_field: str) -> dict[str, Any]:
    """The configuration with the rotary embedding of one kind of layers.

    It is in `rope_parameters`, by kind. Before transformers 5, the base was in `theta_field`, and `rope_scaling` was
    that of layers with full attention; the others have no scaling.
    """
    given = config.get("rope_parameters") or {}
    others = sorted(set(given) - set(KINDS))
    if others:
        raise UnsupportedConfig(f"rope_parameters has {', '.join(others)} beside the kinds of layers")
    parameters = dict(given.get(kind) or {})
    if kind == "full_attention":
        parameters |= config.get("rope_scaling") or {}
    parameters.setdefault("rope_theta", config[theta_field])
    if (parameters.get("rope_type") or parameters.get("type")) in ("longrope", "su"):
        raise UnsupportedConfig(f"RoPE type 'longrope' of {kind} layers is not implemented natively")
    return {**config, "rope_parameters": parameters, "rope_scaling": None}


def local_rope(config: Mapping[str, Any], head_dim: int, theta_field: str) -> RopeConfig:
    """The rotary embedding of layers with a window."""
    rope = rope_config(with_rope_of(config, "sliding_attention", theta_field), head_dim)
    if rope.rotary_dim != head_dim:
        reason = f"rotary embeddings of only {rope.rotary_dim} of {head_dim} dimensions"
        raise UnsupportedConfig(f"{reason} are not implemented natively")
    return rope
