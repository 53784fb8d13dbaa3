"""The native decoder: one implementation, with switches, of Llama and its relatives.

Owns the order of computation and the names that checkpoints give to the norms (`layer_stack` has those of the other
weights). Must not know files, devices or the KV pool.

    tokens ─ embedding ─┬─ norm ─ qkv ─ [qk norm] ─ [rotary] ─ attend ─ o_proj ─(+)─┬─ norm ─ MLP ─(+)─ … ─ norm
                        └────────────────────── residual ───────────────────────────┘ └──── residual ──┘

Some architectures multiply the embeddings and what is added to the residual, (+), by constants, and divide the logits.
The others have None in their place, so that they pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from srv.models.architectures.attention import Attention
from srv.models.architectures.decoder_config import DecoderConfig, Temperature
from srv.models.architectures.layer_stack import LayerStack, StackedLayer
from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.moe import MoE, feed_forward
from srv.models.layers.norm import RMSNorm
from srv.models.layers.rope import cos_sin_table


class DecoderLayer(StackedLayer):
    """Attention and MLP (or a mixture of experts), each preceded by a norm.

    Each output is added to the residual by the norm that follows.
    """

    attention: Attention
    mlp: GatedMLP | MoE

    def __init__(self, config: DecoderConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        self.prefix = f"model.layers.{index}"
        self.attention_norm = RMSNorm(factory.context, config.hidden_size, config.norm_eps)
        self.attention = Attention(config, factory, f"{self.prefix}.self_attn", index)
        self.mlp_norm = RMSNorm(factory.context, config.hidden_size, config.norm_eps)
        sizes, moe = (config.hidden_size, config.intermediate_size), config.moe_of(index)
        self.mlp = feed_forward(factory, f"{self.prefix}.mlp", *sizes, moe, bias=config.mlp_bias)

    def layer_norms(self) -> Mapping[str, RMSNorm]:
        return {"input_layernorm": self.attention_norm, "post_attention_layernorm": self.mlp_norm}


class Decoder(LayerStack[DecoderLayer]):
    """A whole model, or one rank's part."""

    norm: RMSNorm

    def __init__(self, config: DecoderConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config, factory, context_length, lambda index: DecoderLayer(config, factory, index))
        self._embedding_multiplier = unless_one(config.embedding_multiplier)
        self._residual_multiplier = unless_one(config.residual_multiplier)
        self.cos_sin: Tensor
        cos_sin = cos_sin_table(config.rope, context_length).to(factory.context.device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.scales_queries = config.temperature is not None
        self.query_factors: Tensor
        if config.temperature is not None:
            factors = _query_factors(config.temperature, context_length).to(factory.context.device)
            self.register_buffer("query_factors", factors, persistent=False)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens)
        if self._embedding_multiplier is not None:
            residual = residual * self._embedding_multiplier
        reduce = None if self.communicator is None else self.communicator.all_reduce  # no call per layer without ranks
        multiplier, factors = self._residual_multiplier, None
        if self.scales_queries:
            factors = self.query_factors.index_select(0, inputs.positions).view(-1, 1, 1)
        x: Tensor | None = None
        for layer in self.stack:
            if x is None:
                normed = layer.attention_norm(residual)
            else:
                normed, residual = layer.attention_norm.add_and_norm(x, residual)
            attended = layer.attention.forward(normed, inputs.positions, self.cos_sin, context, factors)
            if reduce is not None:
                attended = reduce(attended)
            if multiplier is not None:
                attended = attended * multiplier
            normed, residual = layer.mlp_norm.add_and_norm(attended, residual)
            x = layer.mlp.forward(normed)
            if reduce is not None:
                x = reduce(x)
            if multiplier is not None:
                x = x * multiplier
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add_and_norm(x, residual)[0]


def _query_factors(temperature: Temperature, positions: int) -> Tensor:
    """float32 [positions]."""
    steps = torch.floor(torch.arange(1, positions + 1, dtype=torch.float32) / temperature.step)
    return torch.log1p(steps) * temperature.scale + 1.0


def unless_one(factor: float) -> float | None:
    return None if factor == 1.0 else factor
