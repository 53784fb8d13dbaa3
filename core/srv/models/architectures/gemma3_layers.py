"""The layers of Gemma 3: attention and MLP have a norm before them and another one before they join the residual.

    ─┬─ norm ─ attention ─ norm ─(+)─┬─ norm ─ MLP ─ norm ─(+)─ …
     └─────────── residual ──────────┘└────── residual ─────┘

Owns the order of computation and the names that checkpoints give to the norms. Sharded over ranks, the partial sums of
attention and MLP are added up before the norm that follows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from srv.models.architectures.attention import Attention
from srv.models.architectures.gemma3 import Gemma3Config
from srv.models.architectures.layer_stack import LayerStack, StackedLayer
from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.norm import RMSNorm, UnitOffsetRMSNorm
from srv.models.layers.rope import cos_sin_table


class Gemma3Layer(StackedLayer):
    """One layer. Each output is added to the residual by the first norm of what follows."""

    def __init__(self, config: Gemma3Config, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.has_window = sizes.windows[index] is not None
        self.attention_norm = UnitOffsetRMSNorm(context, hidden, eps)
        self.attention = Attention(sizes, factory, f"{self.prefix}.self_attn", index, norm=UnitOffsetRMSNorm)
        self.attention_output_norm = UnitOffsetRMSNorm(context, hidden, eps, with_residual=False)
        self.mlp_norm = UnitOffsetRMSNorm(context, hidden, eps)
        self.mlp = GatedMLP(factory, f"{self.prefix}.mlp", hidden, sizes.intermediate_size, False, "gelu_tanh")
        self.mlp_output_norm = UnitOffsetRMSNorm(context, hidden, eps, with_residual=False)

    def layer_norms(self) -> Mapping[str, RMSNorm]:
        return {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.attention_output_norm,
            "pre_feedforward_layernorm": self.mlp_norm,
            "post_feedforward_layernorm": self.mlp_output_norm,
        }


class Gemma3(LayerStack[Gemma3Layer]):
    """A whole model, or one rank's part."""

    def __init__(self, config: Gemma3Config, factory: LayerFactory, context_length: int) -> None:
        sizes, context = config.decoder, factory.context
        super().__init__(
            sizes, factory, context_length, lambda index: Gemma3Layer(config, factory, index), UnitOffsetRMSNorm
        )
        # In bfloat16, 55.4 is 55.5: the models were trained with the rounded factor.
        self._embedding_multiplier = torch.tensor(sizes.embedding_multiplier).to(context.dtype).item()
        self.cos_sin: Tensor
        self.local_cos_sin: Tensor
        for name, rope in (("cos_sin", sizes.rope), ("local_cos_sin", config.local_rope)):
            table = cos_sin_table(rope, context_length).to(context.device)
            self.register_buffer(name, table, persistent=False)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens) * self._embedding_multiplier
        x: Tensor | None = None
        for layer in self.stack:
            if x is None:
                normed = layer.attention_norm.forward(residual)
            else:
                normed, residual = layer.attention_norm.add_and_norm(x, residual)
            cos_sin = self.local_cos_sin if layer.has_window else self.cos_sin
            attended = self._sum(layer.attention.forward(normed, inputs.positions, cos_sin, context))
            normed, residual = layer.mlp_norm.add_and_norm(layer.attention_output_norm.forward(attended), residual)
            x = layer.mlp_output_norm.forward(self._sum(layer.mlp.forward(normed)))
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add_and_norm(x, residual)[0]

    def _sum(self, partial: Tensor) -> Tensor:
        """The sum of what all ranks hold of an output."""
        return partial if self.communicator is None else self.communicator.all_reduce(partial)

    def prepare_loaded(self) -> None:
        for module in self.modules():
            if isinstance(module, UnitOffsetRMSNorm):
                module.prepare_loaded()
