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
from srv_example_models.olmo3 import Olmo3Config


class Olmo3Attention(Attention):
    """Attention whose norms span the queries, or the keys, of all heads."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def __init__(self, config: Olmo3Config, factory: LayerFactory, prefix: str, index: int) -> None:
        super().__init__(config, factory, prefix, index)
        context, eps, dim = factory.context, config.norm_eps, config.head_dim
        self.q_norm = RMSNorm(context, config.heads * dim, eps, with_residual=False)
        self.k_norm = RMSNorm(context, config.kv_heads * dim, eps, with_residual=False)

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm.forward(q.flatten(1)).view(q.shape), self.k_norm.forward(k.flatten(1)).view(k.shape)


class Olmo3Layer(StackedLayer):
    def __init__(self, config: Olmo3Config, factory: LayerFactory, index: int) -> None:
        super().__init__()
        context, hidden, eps = factory.context, config.hidden_size, config.norm_eps
        self.prefix = f"model.layers.{index}"
        self.attention = Olmo3Attention(config, factory, f"{self.prefix}.self_attn", index)
        self.attention_norm = RMSNorm(context, hidden, eps, with_residual=False)
        self.mlp = GatedMLP(factory, f"{self.prefix}.mlp", hidden, config.intermediate_size, config.mlp_bias)
        self.mlp_norm = RMSNorm(context, hidden, eps, with_residual=False)

    def layer_norms(self) -> Mapping[str, RMSNorm]:
        return {"post_attention_layernorm": self.attention_norm, "post_feedforward_layernorm": self.mlp_norm}


class Olmo3(LayerStack[Olmo3Layer]):
    def __init__(self, config: Olmo3Config, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config, factory, context_length, lambda index: Olmo3Layer(config, factory, index))
        self.cos_sin: Tensor
        table = cos_sin_table(config.rope, context_length).to(factory.context.device)
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        x: Tensor = self.lookup(inputs.tokens)
        for layer in self.stack:
            x = x + layer.attention_norm.forward(layer.attention.forward(x, inputs.positions, self.cos_sin, context))
            x = x + layer.mlp_norm.forward(layer.mlp.forward(x))
        return self.norm.forward(x)
