"""What models share whose layers have attention, or else states of a fixed size.

    ─┬─ norm ─ attention or states ─(+)─┬─ norm ─ MLP or experts ─(+)─ …
     └─────────── residual ─────────────┘└─────── residual ───────┘

Owns the order of computation. Such models are on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from srv.models.architectures.attention import Attention
from srv.models.architectures.decoder import unless_one
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.gated_attention import GatedAttention
from srv.models.architectures.layer_stack import LayerStack, StackedLayer
from srv.models.base import ForwardContext, ModelInputs
from srv.models.formats.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.moe import MoE
from srv.models.layers.norm import RMSNorm, UnitOffsetRMSNorm
from srv.models.layers.rope import cos_sin_table
from srv.models.layers.states import StateLayer
from srv.specs import AttentionLayer


class HybridLayer(StackedLayer):
    """One layer. `mixer`: what mixes tokens, whose name in the checkpoint is `mixer_name`. `norm_names`: of its norms.

    Each output is added to the residual by the norm that follows.
    """

    mixer: Attention | GatedAttention | StateLayer
    mixer_name: str
    attention_norm: RMSNorm
    mlp_norm: RMSNorm
    feed_forward: GatedMLP | MoE
    norm_names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")

    def mix(self, x: Tensor, inputs: ModelInputs, cos_sin: Tensor, context: ForwardContext) -> Tensor:
        if isinstance(self.mixer, StateLayer):
            return self.mixer.forward(x, context.states)
        return self.mixer.forward(x, inputs.positions, cos_sin, context)

    def layer_norms(self) -> dict[str, RMSNorm]:
        return dict(zip(self.norm_names, (self.attention_norm, self.mlp_norm), strict=True))

    def weight_views(self) -> dict[str, Tensor]:
        mixer = self.mixer
        if isinstance(mixer, StateLayer):
            views = mixer.weight_views()
        else:
            views = mixer.weight_views(f"{self.prefix}.{self.mixer_name}")
        for name, norm in self.layer_norms().items():
            views |= norm.weight_views(f"{self.prefix}.{name}")
        for part in (*mixer.projections, *self.feed_forward.projections):
            views |= part.weight_views()
        return views

    def weight_slices(self) -> dict[str, Slice]:
        """{}: the model is on one rank."""
        return {}


Layer = TypeVar("Layer", bound=HybridLayer)


class HybridStack(LayerStack[Layer]):
    """A whole model. `make_layer(index)` makes its layers, and `norm` the last norm."""

    norm: RMSNorm

    def __init__(
        self,
        config: DecoderConfig,
        factory: LayerFactory,
        context_length: int,
        make_layer: Callable[[int], Layer],
        norm: Callable[[BuildContext, int, float], RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__(config, factory, context_length, make_layer, norm)
        self._embedding_multiplier = unless_one(config.embedding_multiplier)
        self._residual_multiplier = unless_one(config.residual_multiplier)
        self.cos_sin: Tensor
        table = cos_sin_table(config.rope, context_length).to(factory.context.device)
        self.register_buffer("cos_sin", table, persistent=False)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        mixers = (layer.mixer for layer in self.stack)
        return tuple(mixer.layer for mixer in mixers if not isinstance(mixer, StateLayer))

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens)
        if self._embedding_multiplier is not None:
            residual = residual * self._embedding_multiplier
        multiplier = self._residual_multiplier
        x: Tensor | None = None
        for layer in self.stack:
            if x is None:
                normed = layer.attention_norm.forward(residual)
            else:
                normed, residual = layer.attention_norm.add_and_norm(x, residual)
            mixed = layer.mix(normed, inputs, self.cos_sin, context)
            if multiplier is not None:
                mixed = mixed * multiplier
            normed, residual = layer.mlp_norm.add_and_norm(mixed, residual)
            x = layer.feed_forward.forward(normed)
            if multiplier is not None:
                x = x * multiplier
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add_and_norm(x, residual)[0]

    def marked_modules(self) -> dict[str, nn.Module]:
        marked: dict[str, nn.Module] = {"model.embed_tokens": self.lookup, "lm_head": self.lm_head}
        for layer in self.stack:
            marked |= {f"{layer.prefix}.{layer.mixer_name}": layer.mixer, f"{layer.prefix}.mlp": layer.feed_forward}
        return marked

    def prepare_loaded(self) -> None:
        for module in self.modules():
            if isinstance(module, (UnitOffsetRMSNorm, StateLayer)):
                module.prepare_loaded()
