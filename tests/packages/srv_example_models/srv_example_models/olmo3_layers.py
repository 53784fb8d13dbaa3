"""The layers of OLMo 3: attention and MLP have a norm after them, and none before.

    ─┬─ attention ─ norm ─(+)─┬─ MLP ─ norm ─(+)─ …
     └────── residual ────────┘└── residual ─┘

The norms of queries and keys span all heads, so the layers cannot be sharded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from srv.models.architectures.attention import Attention
from srv.models.architectures.layer_stack import LayerStack, StackedLayer
from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.norm import RMSNorm
from srv.models.layers.rope import cos_sin_table
from srv_example_models.olmo3 import NORMS, Olmo3Config


class Olmo3Layer(StackedLayer):
    def __init__(self, config: Olmo3Config, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.attention = Attention(sizes, factory, f"{self.prefix}.self_attn", index)
        self.attention_norm = RMSNorm(context, hidden, eps, with_residual=False)
        self.mlp = GatedMLP(factory, f"{self.prefix}.mlp", hidden, sizes.intermediate_size, sizes.mlp_bias)
        self.mlp_norm = RMSNorm(context, hidden, eps, with_residual=False)

    def layer_norms(self) -> Mapping[str, RMSNorm]:
        return dict(zip(NORMS, (self.attention_norm, self.mlp_norm), strict=True))


class Olmo3(LayerStack[Olmo3Layer]):
    def __init__(self, config: Olmo3Config, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config.decoder, factory, context_length, lambda index: Olmo3Layer(config, factory, index))
        self.cos_sin: Tensor
        table = cos_sin_table(config.decoder.rope, context_length).to(factory.context.device)
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        x: Tensor = self.lookup(inputs.tokens)
        for layer in self.stack:
            x = x + layer.attention_norm.forward(layer.attention.forward(x, inputs.positions, self.cos_sin, context))
            x = x + layer.mlp_norm.forward(layer.mlp.forward(x))
        return self.norm.forward(x)
