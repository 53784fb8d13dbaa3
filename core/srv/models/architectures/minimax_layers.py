"""The layers of MiniMax-Text-01.

─ norm ─┬─ attention ─(· added)─(+)─ norm ─┬─ experts ─(· added)─(+)─ …
        └──────(· kept)──────────┘         └─────(· kept)─────────┘
"""

from __future__ import annotations

from torch import Tensor

from srv.models.architectures.attention import Attention
from srv.models.architectures.hybrid_layers import HybridLayer, HybridStack
from srv.models.architectures.minimax import MiniMaxConfig
from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.factory import LayerFactory
from srv.models.layers.lightning import LightningAttention
from srv.models.layers.moe import MoE
from srv.models.layers.norm import RMSNorm


class MiniMaxLayer(HybridLayer):
    """One layer."""

    mixer_name = "self_attn"
    attention_norm: RMSNorm
    mlp_norm: RMSNorm

    def __init__(self, config: MiniMaxConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context, attends = config.decoder, factory.context, config.attends[index]
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.attention_norm = RMSNorm(context, hidden, eps, with_residual=False)
        name = f"{self.prefix}.{self.mixer_name}"
        if attends:
            self.mixer = Attention(sizes, factory, name, index)
        else:
            self.mixer = LightningAttention(factory, name, hidden, config.scan, eps, index, config.share(index))
        self.mixer_factors, self.mlp_factors = config.full if attends else config.linear, config.mlp
        self.mlp_norm = RMSNorm(context, hidden, eps, with_residual=False)
        self.feed_forward = MoE(factory, f"{self.prefix}.mlp", hidden, config.moe)


class MiniMax(HybridStack[MiniMaxLayer]):
    """A whole model."""

    def __init__(self, config: MiniMaxConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(
            config.decoder,
            factory,
            context_length,
            lambda index: MiniMaxLayer(config, factory, index),
            norm=lambda context, hidden, eps: RMSNorm(context, hidden, eps, with_residual=False),
        )

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        x: Tensor = self.lookup(inputs.tokens)
        for layer in self.stack:
            x = layer.attention_norm.forward(x)
            mixed = layer.mix(x, inputs, self.cos_sin, context)
            x = x * layer.mixer_factors.kept + mixed * layer.mixer_factors.added
            x = layer.mlp_norm.forward(x)
            x = x * layer.mlp_factors.kept + layer.feed_forward.forward(x) * layer.mlp_factors.added
        return self.norm.forward(x)
