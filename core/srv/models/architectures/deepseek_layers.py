"""The layers of DeepSeek-V2 to V3.2, GLM-5 and A.X-K2: latent attention, then an MLP or experts, each after a norm.

Owns the order of computation, which is that of `decoder`, and which layers have experts. Sharded over ranks, attention
and MLP give partial sums, which are added up before they join the residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from srv.models.architectures.deepseek_config import ATTENTION_NORM, MLP_NORM, DeepseekConfig
from srv.models.architectures.latent_attention import LatentAttention
from srv.models.architectures.layer_stack import LayerStack, StackedLayer
from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.factory import LayerFactory
from srv.models.layers.gated_norm import GatedRMSNorm
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.moe import MoE, Weighted, feed_forward
from srv.models.layers.norm import RMSNorm
from srv.models.layers.rope import cos_sin_table
from srv.specs import AttentionLayer


class DeepseekLayer(StackedLayer):
    """One layer. Each output is added to the residual by the norm that follows."""

    attention: LatentAttention
    mlp: GatedMLP | MoE

    def __init__(self, config: DeepseekConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        norms = config.gated_norms(index)

        def norm(name: str) -> RMSNorm:
            if name in norms:
                return GatedRMSNorm(factory, f"{self.prefix}.{name}", hidden, eps, config.gate_rank)
            return RMSNorm(context, hidden, eps)

        self.attention_norm = norm(ATTENTION_NORM)
        self.attention = LatentAttention(
            config.attention, factory, f"{self.prefix}.self_attn", index, config.has_indexer(index)
        )
        self.mlp_norm = norm(MLP_NORM)
        moe = sizes.moe_of(index)
        self.mlp = feed_forward(factory, f"{self.prefix}.mlp", hidden, sizes.intermediate_size, moe)

    def layer_norms(self) -> Mapping[str, RMSNorm]:
        return {ATTENTION_NORM: self.attention_norm, MLP_NORM: self.mlp_norm}

    def _projections(self) -> tuple[Weighted, ...]:
        gated = (norm for norm in (self.attention_norm, self.mlp_norm) if isinstance(norm, GatedRMSNorm))
        return *super()._projections(), *(each for norm in gated for each in norm.projections)


class Deepseek(LayerStack[DeepseekLayer]):
    """A whole model, or one rank's part."""

    norm: RMSNorm

    def __init__(self, config: DeepseekConfig, factory: LayerFactory, context_length: int) -> None:
        sizes = config.decoder
        super().__init__(sizes, factory, context_length, lambda index: DeepseekLayer(config, factory, index))
        self.cos_sin: Tensor
        cos_sin = cos_sin_table(sizes.rope, context_length).to(factory.context.device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens)
        x: Tensor | None = None
        for layer in self.stack:
            if x is None:
                normed = layer.attention_norm.forward(residual)
            else:
                normed, residual = layer.attention_norm.add_and_norm(x, residual)
            attended = self.add_up(layer.attention.forward(normed, inputs.positions, self.cos_sin, context))
            normed, residual = layer.mlp_norm.add_and_norm(attended, residual)
            x = self.add_up(layer.mlp.forward(normed))
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add_and_norm(x, residual)[0]

    def up_projections(self) -> Iterator[tuple[AttentionLayer, Tensor]]:
        for layer in self.stack:
            yield layer.attention.layer, layer.attention.up_projection
