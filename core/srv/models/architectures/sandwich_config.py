"""The configuration of decoders whose attention and MLP have a norm after them: Gemma, GLM-4, OLMo.

Torch-free. Owns the switches in which these differ. Must not know how a layer computes: `sandwich_layers` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from srv.models.architectures.architecture import DividedSizes
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.op_uses import ADD_NORM, GELU, matrices, rotary
from srv.models.blueprint import NORM, SILU, OpUse
from srv.models.derive import ModelOps
from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig, rope_config
from srv.specs import AttentionLayer

LAYERS = "srv.models.architectures.sandwich_layers:SandwichDecoder"
KINDS = ("full_attention", "sliding_attention")
GatedActivation: TypeAlias = Literal["silu", "gelu_tanh"]


class SandwichConfig(NamedTuple):
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

    @property
    def parameters(self) -> int:
        """Those of a Llama-like decoder, which has two norms per layer, and those of the other norms."""
        return self.decoder.parameters + 2 * self.before * self.decoder.layers * self.decoder.hidden_size

    @property
    def projection_params(self) -> int:
        return self.decoder.projection_params

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self.decoder.attention_layers

    @property
    def divided(self) -> DividedSizes | None:
        return self.decoder.divided

    def model_ops(self, dtype: str) -> ModelOps:
        """Norms with an offset are computed in float32, and those with an addition are not fused in other dtypes."""
        sizes = self.decoder
        normed = [sizes.hidden_size]
        if sizes.qk_norm:
            queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
            normed += [queries, keys] if sizes.wide_qk_norm else [sizes.head_dim]
        own = "torch's operator" if self.unit_offset else ""
        of_norms = "float32" if self.unit_offset else None
        ops = [OpUse(NORM, {"dim": dim}, of_norms, own=own) for dim in dict.fromkeys(normed)]
        if not self.unit_offset or dtype == of_norms:
            ops.append(OpUse(ADD_NORM, {"dim": sizes.hidden_size}, of_norms))
        ops += rotary(sizes)
        width = {"dim": sizes.intermediate_size}
        ops.append(OpUse(SILU, width) if self.activation == "silu" else OpUse(GELU, width, own="torch's operators"))
        return ModelOps(tuple(ops), tuple(matrices(sizes)))

    def of_rank(self, ranks: int) -> SandwichConfig:
        return self._replace(decoder=self.decoder.of_rank(ranks))


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
