"""The layers of LFM2: attention in some of them, short convolutions in the others."""

from __future__ import annotations

from srv.models.architectures.attention import Attention
from srv.models.architectures.hybrid_layers import HybridLayer, HybridStack
from srv.models.architectures.lfm2 import Lfm2Config
from srv.models.layers.factory import LayerFactory
from srv.models.layers.moe import feed_forward
from srv.models.layers.norm import RMSNorm
from srv.models.layers.short_conv import ShortConvolution


class Lfm2Layer(HybridLayer):
    """One layer. `attention`: makes the mixer of those that attend."""

    def __init__(
        self, config: Lfm2Config, factory: LayerFactory, index: int, attention: type[Attention] = Attention
    ) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.attention_norm = RMSNorm(context, hidden, eps)
        self.mixer_name = "self_attn" if config.attends[index] else "conv"
        name = f"{self.prefix}.{self.mixer_name}"
        if config.attends[index]:
            self.mixer = attention(sizes, factory, name, index)
        else:
            self.mixer = ShortConvolution(factory, name, hidden, config.width, config.bias, index)
        self.mlp_norm = RMSNorm(context, hidden, eps)
        moe = config.moe_of(index)
        self.feed_forward = feed_forward(factory, f"{self.prefix}.mlp", hidden, sizes.intermediate_size, moe)


class Lfm2(HybridStack[Lfm2Layer]):
    """A whole model."""

    def __init__(self, config: Lfm2Config, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config.decoder, factory, context_length, lambda index: Lfm2Layer(config, factory, index))
