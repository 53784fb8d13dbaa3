"""The layers of RecurrentGemma: attention to a window in some of them, a gated linear recurrence in the others."""

from __future__ import annotations

import torch
from torch import Tensor

from srv.models.architectures.attention import Attention
from srv.models.architectures.hybrid_layers import HybridLayer, HybridStack
from srv.models.architectures.recurrent_gemma import RecurrentGemmaConfig
from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.norm import UnitOffsetRMSNorm
from srv.models.layers.rglru import RecurrentBlock


class RecurrentGemmaLayer(HybridLayer):
    """One layer."""

    mixer_name = "temporal_block"
    norm_names = ("temporal_pre_norm", "channel_pre_norm")

    def __init__(self, config: RecurrentGemmaConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.attention_norm = UnitOffsetRMSNorm(context, hidden, eps)
        name = f"{self.prefix}.{self.mixer_name}"
        if config.attends[index]:
            self.mixer = Attention(sizes, factory, name, index)
        else:
            self.mixer = RecurrentBlock(factory, name, hidden, config.channels, config.width, sizes.heads, index)
        self.mlp_norm = UnitOffsetRMSNorm(context, hidden, eps)
        widths = (hidden, sizes.intermediate_size)
        self.feed_forward = GatedMLP(factory, f"{self.prefix}.mlp", *widths, sizes.mlp_bias, "gelu_tanh")

    def mix(self, x: Tensor, inputs: ModelInputs, cos_sin: Tensor, context: ForwardContext) -> Tensor:
        """The first token of a request enters the recurrence as it is, whatever its gate."""
        if isinstance(self.mixer, RecurrentBlock):
            return self.mixer.forward(x, context.states, (inputs.positions == 0).unsqueeze(-1))
        return super().mix(x, inputs, cos_sin, context)


class RecurrentGemma(HybridStack[RecurrentGemmaLayer]):
    """A whole model."""

    def __init__(self, config: RecurrentGemmaConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(
            config.decoder,
            factory,
            context_length,
            lambda index: RecurrentGemmaLayer(config, factory, index),
            UnitOffsetRMSNorm,
        )
        # Models of every dtype were trained with the factor as bfloat16 rounds it.
        self._embedding_multiplier = torch.tensor(config.decoder.embedding_multiplier).bfloat16().item()
