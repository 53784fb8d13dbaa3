"""Decoders whose attention and MLP have a norm after them: Gemma, GLM-4, OLMo.

Torch-free. Owns what their trees have in common, and the fields of rotary embeddings per kind of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from srv.models.blueprint import MLP, Attention, Decoder, Layer, Norm, alike
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.layers.rope_config import RopeConfig, rope_config
from srv.models.unsupported import UnsupportedConfig

KINDS = ("full_attention", "sliding_attention")


def sandwich_decoder(
    sizes: Sizes,
    attention: Attention | Sequence[Attention],
    mlp: MLP,
    *,
    before: bool = True,
    wide: bool = False,
    factor: float = 1.0,
    logits_soft_cap: float | None = None,
) -> Decoder:
    """`before`: attention and MLP each have a norm before them as well. `wide`: as of `Norm`. `factor`: of embeddings,
    rounded to the model's dtype.
    """

    def norm(name: str, adds: bool = False) -> Norm:
        return Norm(sizes.hidden_size, sizes.norm_eps, adds=adds, wide=wide, name=name)

    first = (norm(parts.BEFORE_MIXER, adds=True),) if before else ()
    second = (norm("pre_feedforward_layernorm", adds=True),) if before else ()
    between, after = (norm(parts.BEFORE_MLP), *second), (norm("post_feedforward_layernorm"),)
    made = alike(parts.of_layers(sizes, attention), lambda each: Layer(first, (each,), between, mlp, after))
    last = parts.last_norm(sizes, wide=wide)
    return parts.decoder(sizes, made, last, factor=factor, factor_dtype="", logits_soft_cap=logits_soft_cap)


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
