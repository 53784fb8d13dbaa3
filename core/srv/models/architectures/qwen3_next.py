"""Qwen3-Next: the facts of a decoder most of whose layers keep a recurrent state instead of keys and values.

Every fourth layer has attention, with a sigmoid gate on its result; the others have the gated delta rule. The
feed-forward layers are mixtures of experts, or dense ones. Torch-free. Owns what Qwen3.5
(`qwen3_5`) has in common with it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from srv.models.architectures import parts
from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import decoder_config
from srv.models.architectures.hybrid_config import HybridConfig, attending, check_experts
from srv.models.blueprint import Attention, Layer, Linear, Norm, Part, Tensors
from srv.models.layers.delta_sizes import DeltaSizes
from srv.models.layers.moe_config import MoEConfig, Routing
from srv.models.layers.rope_config import UnsupportedConfig
from srv.models.recurrent_parts import DeltaNet

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

    @functools.cached_property
    def tree(self) -> Part:
        """Norms are computed in float32."""
        made = parts.layers(list(zip(self.attends, self.has_experts, strict=True)), self._layer)
        return parts.decoder(self.decoder, made, parts.last_norm(self.decoder, wide=True))

    def _layer(self, index: int) -> Layer:
        sizes = self.decoder
        if self.attends[index]:
            mixer: Attention | DeltaNet = parts.attention(sizes, index, wide=True, gated_queries=True)
        else:
            mixer = delta_net(self.delta, sizes.hidden_size, sizes.norm_eps)
        return parts.pre_norm(sizes, mixer, parts.feed_forward(sizes, self.moe_of(index)), wide=True)


def delta_net(sizes: DeltaSizes, hidden: int, eps: float) -> DeltaNet:
    """A layer with the gated delta rule."""
    inputs, rates = sizes.inputs
    convolutions = {f"{name}.weight": (channels, 1, sizes.width) for name, channels in sizes.convolutions.items()}
    return DeltaNet(
        Linear(inputs, hidden),
        Linear(rates, hidden),
        Tensors({**convolutions, "dt_bias": (sizes.value_heads,), "A_log": (sizes.value_heads,)}),
        Norm(sizes.value_dim, eps, name="o_norm" if sizes.apart else "norm"),
        Linear({sizes.output: hidden}, sizes.values),
        sizes,
        name="linear_attn",
    )


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
    decoder = base.replace(qkv_bias=bias, output_bias=bias, qk_norm=True)
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
    model_type="qwen3_next",
)
