"""The layers of Qwen3-Next and Qwen3.5: attention with a gate in some of them, the gated delta rule in the others.

Owns the names that checkpoints give to these weights.
"""

from __future__ import annotations

from srv.models.architectures.gated_attention import GatedAttention
from srv.models.architectures.hybrid_layers import HybridLayer, HybridStack
from srv.models.architectures.qwen3_next import Qwen3NextConfig
from srv.models.layers.delta import GatedDeltaNet
from srv.models.layers.factory import LayerFactory
from srv.models.layers.moe import feed_forward
from srv.models.layers.norm import UnitOffsetRMSNorm


class Qwen3NextLayer(HybridLayer):
    """One layer."""

    def __init__(self, config: Qwen3NextConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.attention_norm = UnitOffsetRMSNorm(context, hidden, eps)
        self.mixer_name = "self_attn" if config.attends[index] else "linear_attn"
        name = f"{self.prefix}.{self.mixer_name}"
        if config.attends[index]:
            self.mixer = GatedAttention(sizes, factory, name, index)
        else:
            self.mixer = GatedDeltaNet(factory, name, hidden, config.delta, eps, index)
        self.mlp_norm = UnitOffsetRMSNorm(context, hidden, eps)
        moe = config.moe_of(index)
        self.feed_forward = feed_forward(factory, f"{self.prefix}.mlp", hidden, sizes.intermediate_size, moe)


class Qwen3Next(HybridStack[Qwen3NextLayer]):
    """A whole model."""

    def __init__(self, config: Qwen3NextConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(
            config.decoder,
            factory,
            context_length,
            lambda index: Qwen3NextLayer(config, factory, index),
            UnitOffsetRMSNorm,
        )
