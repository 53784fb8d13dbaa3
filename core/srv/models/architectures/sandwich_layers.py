"""Layers whose attention and MLP have a norm after them, before they join the residual, and usually one before them.

    ─┬─ [norm] ─ attention ─ norm ─(+)─┬─ [norm] ─ MLP ─ norm ─(+)─ …
     └──────────── residual ───────────┘└────── residual ──────┘

Owns the order of computation and the names of the norms: those of Gemma, which checkpoints with other names translate
(`srv.models.formats.stored_weights`). Sharded over ranks, the partial sums of attention and MLP are added up before the
norm that follows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from srv.models.architectures.attention import Attention
from srv.models.architectures.layer_stack import LayerStack, StackedLayer
from srv.models.architectures.sandwich_config import SandwichConfig
from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.norm import RMSNorm, UnitOffsetRMSNorm, joined
from srv.models.layers.rope import cos_sin_table


class SandwichLayer(StackedLayer):
    """One layer. Each output is added to the residual by the first norm of what follows, if there is one."""

    def __init__(self, config: SandwichConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        norm = UnitOffsetRMSNorm if config.unit_offset else RMSNorm
        self.prefix = f"model.layers.{index}"
        self.has_local_rope = config.local_rope is not None and sizes.windows[index] is not None
        self.attention_norm = norm(context, hidden, eps) if config.before else None
        self.attention = Attention(sizes, factory, f"{self.prefix}.self_attn", index, norm=norm)
        self.attention_output_norm = norm(context, hidden, eps, with_residual=False)
        self.mlp_norm = norm(context, hidden, eps) if config.before else None
        widths = (hidden, sizes.intermediate_size)
        self.mlp = GatedMLP(factory, f"{self.prefix}.mlp", *widths, sizes.mlp_bias, config.activation)
        self.mlp_output_norm = norm(context, hidden, eps, with_residual=False)

    def layer_norms(self) -> Mapping[str, RMSNorm]:
        norms = {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.attention_output_norm,
            "pre_feedforward_layernorm": self.mlp_norm,
            "post_feedforward_layernorm": self.mlp_output_norm,
        }
        return {name: norm for name, norm in norms.items() if norm is not None}


class SandwichDecoder(LayerStack[SandwichLayer]):
    """A whole model, or one rank's part."""

    norm: RMSNorm

    def __init__(self, config: SandwichConfig, factory: LayerFactory, context_length: int) -> None:
        sizes, context = config.decoder, factory.context
        norm = UnitOffsetRMSNorm if config.unit_offset else RMSNorm
        super().__init__(sizes, factory, context_length, lambda index: SandwichLayer(config, factory, index), norm)
        self._embedding_multiplier: float | None = None
        if sizes.embedding_multiplier != 1.0:
            # In bfloat16, 55.4 is 55.5: the models were trained with the rounded factor.
            self._embedding_multiplier = torch.tensor(sizes.embedding_multiplier).to(context.dtype).item()
        self.cos_sin: Tensor
        self.local_cos_sin: Tensor
        for name, rope in (("cos_sin", sizes.rope), ("local_cos_sin", config.local_rope)):
            table = None if rope is None else cos_sin_table(rope, context_length).to(context.device)
            self.register_buffer(name, table, persistent=False)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens)
        if self._embedding_multiplier is not None:
            residual = residual * self._embedding_multiplier
        x: Tensor | None = None
        for layer in self.stack:
            read, residual = joined(layer.attention_norm, x, residual)
            cos_sin = self.local_cos_sin if layer.has_local_rope else self.cos_sin
            attended = self.add_up(layer.attention.forward(read, inputs.positions, cos_sin, context))
            read, residual = joined(layer.mlp_norm, layer.attention_output_norm.forward(attended), residual)
            x = layer.mlp_output_norm.forward(self.add_up(layer.mlp.forward(read)))
        return joined(self.norm, x, residual)[0]

    def prepare_loaded(self) -> None:
        super().prepare_loaded()
        for module in self.modules():
            if isinstance(module, UnitOffsetRMSNorm):
                module.prepare_loaded()
