"""Qwen3-Next: the facts of a decoder most of whose layers keep a recurrent state instead of keys and values.

Every fourth layer has attention, with a sigmoid gate on its result; the others have the gated delta rule. The
feed-forward layers are mixtures of experts, or dense ones. Torch-free; `qwen3_next_layers` computes. Owns what Qwen3.5
(`qwen3_5`) has in common with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import decoder_config
from srv.models.architectures.hybrid_config import HybridConfig, attending, check_experts
from srv.models.architectures.op_uses import (
    ADD_NORM,
    OUTPUT,
    feed_forward_matrices,
    feed_forward_ops,
    layer_experts,
    rotary,
)
from srv.models.blueprint import NORM, OpUse
from srv.models.derive import Matrix, ModelOps
from srv.models.layers.delta_sizes import DeltaSizes
from srv.models.layers.moe_config import MoEConfig, Routing
from srv.models.layers.rope_config import UnsupportedConfig

KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class Qwen3NextConfig(HybridConfig):
    """`has_experts`: whether the feed-forward part of each layer is a mixture of experts, `moe`."""

    delta: DeltaSizes
    moe: MoEConfig | None
    has_experts: tuple[bool, ...]

    def moe_of(self, index: int) -> MoEConfig | None:
        """The mixture of experts of a layer; None if it has an MLP."""
        return self.moe if self.has_experts[index] else None

    @property
    def recurrent(self) -> DeltaSizes:
        return self.delta

    @property
    def parameters(self) -> int:
        """Biases of attention, norms, routers, and what computes decays come on top of the matrices."""
        sizes, delta = self.decoder, self.delta
        hidden, attending = sizes.hidden_size, sum(self.attends)
        qkv = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        attention = 2 * sizes.head_dim + qkv * sizes.qkv_bias + hidden * sizes.output_bias
        recurrent = delta.channels * delta.width + 2 * delta.value_heads + delta.value_dim
        routers = 0 if self.moe is None else sum(self.has_experts) * self.moe.other_params(hidden)
        norms = (2 * sizes.layers + 1) * hidden
        mixers = attending * attention + (sizes.layers - attending) * recurrent
        return sizes.embedding_parameters + self.projection_params + norms + mixers + routers

    @property
    def projection_params(self) -> int:
        hidden, attending = self.decoder.hidden_size, sum(self.attends)
        dense = 3 * hidden * self.decoder.intermediate_size
        experts = 0 if self.moe is None else self.moe.projection_params(hidden)
        mlps = sum(experts if each else dense for each in self.has_experts)
        heads, pairs = self.decoder.heads * self.decoder.head_dim, self.decoder.kv_heads * self.decoder.head_dim
        attention = hidden * (3 * heads + 2 * pairs)
        delta = self.delta
        recurrent = hidden * (delta.channels + 2 * delta.values + 2 * delta.value_heads)
        return mlps + attending * attention + (self.decoder.layers - attending) * recurrent

    def model_ops(self, dtype: str) -> ModelOps:
        """Norms are computed in float32, and those with an addition are not fused in other dtypes."""
        sizes, delta, wide = self.decoder, self.delta, "float32"
        hidden = {"dim": sizes.hidden_size}
        ops = [OpUse(NORM, hidden, wide, own="torch's operator")]
        if dtype == wide:
            ops.append(OpUse(ADD_NORM, hidden, wide))
        if any(self.attends):
            ops += [OpUse(NORM, {"dim": sizes.head_dim}, wide, own="torch's operator"), *rotary(sizes)]
        if not all(self.attends):
            heads = {"key_heads": delta.key_heads, "value_heads": delta.value_heads}
            dims = {"key_dim": delta.key_dim, "value_dim": delta.value_dim}
            ops.append(OpUse("causal_conv1d", {"channels": delta.channels, "width": delta.width}))
            ops.append(OpUse("gated_delta_rule", {**heads, **dims}))
            ops.append(OpUse(NORM, {"dim": delta.value_dim}))
        mixtures = [self.moe_of(index) for index in range(sizes.layers)]
        ops += feed_forward_ops(mixtures, sizes.intermediate_size)
        return ModelOps(tuple(ops), tuple(self._matrices()), layer_experts(mixtures, sizes.hidden_size))

    def _matrices(self) -> Iterator[Matrix]:
        """Those of linear layers, in the order of the checkpoint's layers; not those of experts."""
        sizes, delta, hidden = self.decoder, self.delta, self.decoder.hidden_size
        yield Matrix(("model.embed_tokens",), hidden, sizes.vocab_size, embedding=True)
        for index, attends in enumerate(self.attends):
            prefix = f"model.layers.{index}"
            if attends:
                qkv = tuple(f"{prefix}.self_attn.{name}_proj" for name in "qkv")
                queries, keys, values = sizes.qkv_parts  # each query has a gate
                parts = (2 * queries, keys, values)
                yield Matrix(qkv, hidden, sum(parts), parts=parts)
                yield Matrix((f"{prefix}.self_attn.o_proj",), queries, hidden)
            else:
                for inputs in delta.inputs:
                    names = tuple(f"{prefix}.linear_attn.{name}" for name in inputs)
                    yield Matrix(names, hidden, sum(inputs.values()), parts=tuple(inputs.values()))
                yield Matrix((f"{prefix}.linear_attn.out_proj",), delta.values, hidden)
            yield from feed_forward_matrices(self.moe_of(index), f"{prefix}.mlp", hidden, sizes.intermediate_size)
        yield Matrix((OUTPUT,), hidden, sizes.vocab_size, tied=sizes.tied_embeddings)


def make_config(config: Mapping[str, Any]) -> Qwen3NextConfig:
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=bool(config["norm_topk_prob"]))
    moe = mixture_with_shared(config, routing)
    dense, step = set(config["mlp_only_layers"] or ()), int(config["decoder_sparse_step"])
    layers = range(int(config["num_hidden_layers"]))
    sparse = tuple(i not in dense and moe.experts > 0 and (i + 1) % step == 0 for i in layers)
    return with_delta_rule(config, moe, sparse, by_heads=True)


def with_delta_rule(
    config: Mapping[str, Any], moe: MoEConfig | None, has_experts: tuple[bool, ...], *, by_heads: bool
) -> Qwen3NextConfig:
    """The configuration of a model with these experts. `by_heads`: as in `DeltaSizes`."""
    own = ("partial_rotary_factor",) if moe is None else ("partial_rotary_factor", "num_experts")
    base = decoder_config(config, reads=own)
    bias = bool(config["attention_bias"])
    delta = DeltaSizes(
        int(config["linear_num_key_heads"]),
        int(config["linear_num_value_heads"]),
        int(config["linear_key_head_dim"]),
        int(config["linear_value_head_dim"]),
        int(config["linear_conv_kernel_dim"]),
        by_heads,
    )
    if delta.value_heads % delta.key_heads:
        reason = f"{delta.value_heads} value heads are not a multiple of {delta.key_heads} key heads"
        raise UnsupportedConfig(f"{reason} (linear_num_value_heads, linear_num_key_heads)")
    types = config.get("layer_types")
    if types is None:
        interval = int(config["full_attention_interval"])
        types = [KINDS[(layer + 1) % interval == 0] for layer in range(base.layers)]
    attends = attending(types, KINDS, base.layers)
    moe = moe if any(has_experts) else None
    if moe is not None:
        check_experts(moe)
        if moe.shared_intermediate <= 0:
            raise UnsupportedConfig(f"shared_expert_intermediate_size = {moe.shared_intermediate} is not a size")
    decoder = base._replace(qkv_bias=bias, output_bias=bias, qk_norm=True)
    return Qwen3NextConfig(decoder, attends, delta, moe, has_experts)


def mixture_with_shared(config: Mapping[str, Any], routing: Routing) -> MoEConfig:
    inner, shared = int(config["moe_intermediate_size"]), int(config["shared_expert_intermediate_size"])
    return MoEConfig(int(config["num_experts"]), inner, routing, shared, shared_gate=True)


# The values that transformers uses for fields that a configuration of either family leaves out.
SHARED_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 16,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
)
LAYERS = "srv.models.architectures.qwen3_next_layers:Qwen3Next"
ARCHITECTURE = Architecture(
    name="Qwen3NextForCausalLM",
    make_config=make_config,
    defaults={
        **SHARED_DEFAULTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    layers=LAYERS,
    model_type="qwen3_next",
)
