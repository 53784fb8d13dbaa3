"""The layers of models with Mamba-2: attention in some of them, Mamba-2 in the others, or both."""

from __future__ import annotations

from srv.models.architectures.attention import Attention
from srv.models.architectures.hybrid_layers import HybridLayer, HybridStack
from srv.models.architectures.mamba_config import MambaConfig
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.moe import MoE
from srv.models.layers.norm import RMSNorm
from srv.models.layers.state_space import StateSpace


class MambaLayer(HybridLayer):
    """One layer."""

    def __init__(self, config: MambaConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.attention_norm = RMSNorm(context, hidden, eps)
        self.mixer_name = "self_attn" if config.attends[index] else "mamba"
        name = f"{self.prefix}.{self.mixer_name}"
        if config.attends[index]:
            self.mixer = Attention(sizes, factory, name, index)
        else:
            self.mixer = StateSpace(factory, name, hidden, config.mamba, eps, index)
        self.mlp_norm = RMSNorm(context, hidden, eps)
        if config.moe is None:
            mlp = f"{self.prefix}.{config.mlp}"
            self.feed_forward = GatedMLP(factory, mlp, hidden, sizes.intermediate_size, sizes.mlp_bias)
        else:
            self.feed_forward = MoE(factory, f"{self.prefix}.mlp", hidden, config.moe)


class Mamba(HybridStack[MambaLayer]):
    """A whole model."""

    def __init__(self, config: MambaConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config.decoder, factory, context_length, lambda index: MambaLayer(config, factory, index))
