"""The layers of HY-V4: those of DeepSeek, between hyper-connections over several residual streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from srv.models.architectures.hy_v4 import HyV4Config
from srv.models.architectures.latent_attention import LatentAttention
from srv.models.architectures.layer_stack import LayerStack, StackedLayer
from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.factory import LayerFactory
from srv.models.layers.hyper_connections import HyperConnection, StreamHead
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.moe import MoE, feed_forward
from srv.models.layers.norm import Norm, RMSNorm
from srv.models.layers.rope import cos_sin_table
from srv.specs import AttentionLayer


class HyV4Layer(StackedLayer):
    """One layer."""

    attention: LatentAttention
    mlp: GatedMLP | MoE

    def __init__(self, config: HyV4Config, factory: LayerFactory, index: int) -> None:
        super().__init__()
        base, context = config.base, factory.context
        hidden, eps = base.decoder.hidden_size, base.decoder.norm_eps
        self.prefix = f"model.layers.{index}"
        self.attention_streams = HyperConnection(context, config.streams, hidden)
        self.attention_norm = RMSNorm(context, hidden, eps, with_residual=False)
        attention = f"{self.prefix}.self_attn"
        self.attention = LatentAttention(base.attention, factory, attention, index, base.has_indexer(index))
        self.mlp_streams = HyperConnection(context, config.streams, hidden)
        self.mlp_norm = RMSNorm(context, hidden, eps, with_residual=False)
        moe = base.decoder.moe_of(index)
        self.mlp = feed_forward(factory, f"{self.prefix}.mlp", hidden, base.decoder.intermediate_size, moe)

    def layer_norms(self) -> Mapping[str, Norm]:
        return {"input_layernorm": self.attention_norm, "post_attention_layernorm": self.mlp_norm}

    def weight_views(self) -> dict[str, Tensor]:
        views = super().weight_views() | self.attention_streams.weight_views(f"{self.prefix}.attn_hc")
        return views | self.mlp_streams.weight_views(f"{self.prefix}.ffn_hc")


class HyV4(LayerStack[HyV4Layer]):
    """A whole model, or one rank's part."""

    def __init__(self, config: HyV4Config, factory: LayerFactory, context_length: int) -> None:
        sizes, context = config.base.decoder, factory.context
        super().__init__(
            sizes,
            factory,
            context_length,
            lambda index: HyV4Layer(config, factory, index),
            lambda context, dim, eps: RMSNorm(context, dim, eps, with_residual=False),
        )
        self.streams = config.streams.number
        self.head = StreamHead(context, config.streams, sizes.hidden_size)
        self.cos_sin: Tensor
        cos_sin = cos_sin_table(sizes.rope, context_length).to(context.device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        embedded: Tensor = self.lookup(inputs.tokens)
        streams = embedded.unsqueeze(1).expand(-1, self.streams, -1)
        for layer in self.stack:
            x, weights = layer.attention_streams.read(streams)
            normed = layer.attention_norm.forward(x)
            attended = self.add_up(layer.attention.forward(normed, inputs.positions, self.cos_sin, context))
            streams = layer.attention_streams.join(streams, attended, weights)
            x, weights = layer.mlp_streams.read(streams)
            result = self.add_up(layer.mlp.forward(layer.mlp_norm.forward(x)))
            streams = layer.mlp_streams.join(streams, result, weights)
        return self.norm.forward(self.head.forward(streams))

    def up_projections(self) -> Iterator[tuple[AttentionLayer, Tensor]]:
        for layer in self.stack:
            yield layer.attention.layer, layer.attention.up_projection

    def weight_views(self) -> dict[str, Tensor]:
        return super().weight_views() | self.head.weight_views("model.hc_head", "hc_")
