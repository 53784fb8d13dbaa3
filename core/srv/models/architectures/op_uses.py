"""Which ops the layers of a native model call, and with which sizes, before it is built. Torch-free.

Owns what layers of `srv.models.layers` bind, as data. A configuration describes its layers by it; `srv plan --kernels`
reads it, and a test compares it with what the layers bind. Must not know platforms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from srv.models.blueprint import LAYER_NORM, NORM, ROTARY, SILU, OpUse, torch_op
from srv.models.derive import ExpertMatrices, Matrix, ModelOps
from srv.models.layers.moe_config import ROUTER

if TYPE_CHECKING:
    from srv.models.architectures.decoder_config import DecoderConfig
    from srv.models.architectures.layer_norm_config import LayerNormConfig
    from srv.models.layers.moe_config import MoEConfig

ADD_NORM, GELU = "add_rms_norm", "gelu_tanh_and_mul"
ROUTE = "route_experts"
OUTPUT = "lm_head"
GATED_SILU = "silu_gated"  # of `LayerNormConfig.mlp`; its other values are the names of activations


@runtime_checkable
class DescribesOps(Protocol):
    """A `NativeConfig` that describes what its layers call. One that does not is shown as unknown."""

    def model_ops(self, dtype: str) -> ModelOps:
        """`dtype`: of the model. Of the configuration of one rank, what that rank calls."""


def decoder_ops(config: DecoderConfig) -> ModelOps:
    """Those of a pre-norm decoder with a gated MLP and SiLU (`srv.models.architectures.decoder`)."""
    hidden = {"dim": config.hidden_size}
    ops = [OpUse(NORM, hidden), OpUse(ADD_NORM, hidden)]
    if config.qk_norm or (config.unit_rotated and any(config.rotated)):
        ops.append(OpUse(NORM, {"dim": config.head_dim}))
    ops += rotary(config)
    mixtures = [config.moe_of(index) for index in range(config.layers)]
    ops += feed_forward_ops(mixtures, config.intermediate_size)
    return ModelOps(tuple(ops), tuple(matrices(config)), layer_experts(mixtures, config.hidden_size))


def feed_forward_ops(mixtures: Sequence[MoEConfig | None], width: int) -> Iterator[OpUse]:
    """Those of the feed-forward parts of all layers: the mixture of experts of each, or None for an MLP of `width`."""
    if None in mixtures:
        yield OpUse(SILU, {"dim": width})
    for moe in dict.fromkeys(mixtures):
        if moe is not None:
            yield from mixture_ops(moe)


def layer_experts(mixtures: Sequence[MoEConfig | None], hidden: int) -> tuple[ExpertMatrices, ...]:
    """The experts of all layers. `mixtures`: as of `feed_forward_ops`."""
    return tuple(
        ExpertMatrices(f"model.layers.{index}.mlp.experts", expert_sizes(moe, hidden), moe.expert_bias)
        for index, moe in enumerate(mixtures)
        if moe is not None
    )


def mixture_ops(moe: MoEConfig) -> Iterator[OpUse]:
    """Those of `srv.models.layers.moe` beside its matrices and experts."""
    yield OpUse(ROUTE, {"experts": moe.experts, "top_k": moe.routing.top_k})
    if moe.shared_intermediate:
        yield OpUse(SILU, {"dim": moe.shared_intermediate})


def expert_sizes(moe: MoEConfig, hidden: int) -> Mapping[str, int]:
    top_k = moe.routing.top_k
    return {"hidden": hidden, "intermediate": moe.intermediate, "experts": moe.experts, "top_k": top_k}


def mixture_matrices(moe: MoEConfig, prefix: str, hidden: int) -> Iterator[Matrix]:
    """Those of `srv.models.layers.moe`, in order, without the experts. `prefix`: of their names."""
    yield Matrix((f"{prefix}.{moe.router}",), hidden, moe.experts, role=ROUTER, bias=moe.router_bias)
    if moe.shared_intermediate:
        shared = f"{prefix}.{moe.shared}"
        yield from mlp_matrices(shared, hidden, moe.shared_intermediate)
        if moe.shared_gate:
            yield Matrix((f"{shared}_gate",), hidden, 1)


def feed_forward_matrices(
    moe: MoEConfig | None, prefix: str, hidden: int, width: int, *, gated: bool = True
) -> Iterator[Matrix]:
    """Those of a mixture of experts or, for None, of an MLP of `width`."""
    if moe is None:
        return mlp_matrices(prefix, hidden, width, gated=gated)
    return mixture_matrices(moe, prefix, hidden)


def mlp_matrices(prefix: str, hidden: int, width: int, *, gated: bool = True) -> Iterator[Matrix]:
    up = (f"{prefix}.gate_proj", f"{prefix}.up_proj") if gated else (f"{prefix}.up_proj",)
    yield Matrix(up, hidden, len(up) * width)
    yield Matrix((f"{prefix}.down_proj",), width, hidden)


def layer_norm_ops(config: LayerNormConfig) -> ModelOps:
    """Those of a decoder with LayerNorm (`srv.models.architectures.layer_norm_layers`)."""
    decoder, gated = config.decoder, config.mlp == GATED_SILU
    ops = [torch_op(LAYER_NORM, decoder.hidden_size)]
    if config.head_norms:
        ops.append(torch_op(LAYER_NORM, decoder.head_dim))
    ops += rotary(decoder)
    width = decoder.intermediate_size
    ops.append(OpUse(SILU, {"dim": width}) if gated else torch_op(config.mlp, width))
    return ModelOps(tuple(ops), tuple(matrices(decoder, gated=gated)))


def rotary(config: DecoderConfig) -> list[OpUse]:
    sizes = {"head_dim": config.head_dim, "rotary_dim": config.rope.rotary_dim}
    return [OpUse(ROTARY, sizes)] if any(config.rotated) else []


def matrices(config: DecoderConfig, *, gated: bool = True) -> Iterator[Matrix]:
    """The matrices of `srv.models.architectures.layer_stack`, in order. `gated`: whether the MLP has a gate."""
    hidden, heads = config.hidden_size, config.heads * config.head_dim
    yield Matrix(("model.embed_tokens",), hidden, config.vocab_size, embedding=True)
    for index in range(config.layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
        yield Matrix(qkv, hidden, config.qkv_size, parts=config.qkv_parts)
        yield Matrix((f"{attention}.o_proj",), heads, hidden)
        yield from feed_forward_matrices(config.moe_of(index), mlp, hidden, config.intermediate_size, gated=gated)
    yield Matrix((OUTPUT,), hidden, config.vocab_size, tied=config.tied_embeddings)
