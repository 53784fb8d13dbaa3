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
from srv.models.layers.norm import RMSNorm, UnitOffsetRMSNorm, joined
from srv.models.layers.rope import cos_sin_table
from srv.models.layers.rope_config import RopeConfig
from srv.models.layers.states import StateLayer
from srv.specs import AttentionLayer


class HybridLayer(StackedLayer):
    """One layer. `mixer`: what mixes tokens, whose name in the checkpoint is `mixer_name`. `norm_names`: of its norms.

    Each output is added to the residual by the norm that follows, if there is one. `output_norms`: those of the outputs
    of `mixer` and `feed_forward`, in models that have them. `has_local_rope`: whether attention has the second rotary
    embedding of the model.
    """

    mixer: Attention | GatedAttention | StateLayer
    mixer_name: str
    attention_norm: RMSNorm | None
    mlp_norm: RMSNorm | None
    feed_forward: GatedMLP | MoE
    norm_names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    output_norms: tuple[RMSNorm, RMSNorm] | None = None
    has_local_rope: bool = False

    def mix(self, x: Tensor, inputs: ModelInputs, cos_sin: Tensor, context: ForwardContext) -> Tensor:
        if isinstance(self.mixer, StateLayer):
            mixed = self.mixer.forward(x, context.states)
        else:
            mixed = self.mixer.forward(x, inputs.positions, cos_sin, context)
        return mixed if self.output_norms is None else self.output_norms[0].forward(mixed)

    def feed(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]: what the feed-forward part adds to the residual."""
        output = self.feed_forward.forward(x)
        return output if self.output_norms is None else self.output_norms[1].forward(output)

    def layer_norms(self) -> dict[str, RMSNorm]:
        """By the names in the checkpoint: those before the two parts, then those of their outputs."""
        norms = (self.attention_norm, self.mlp_norm, *(self.output_norms or ()))
        return dict(zip(self.norm_names, (norm for norm in norms if norm is not None), strict=True))

    def norm_outputs(self, of_mixer: RMSNorm, of_mlp: RMSNorm) -> None:
        """Set `output_norms`."""
        self.mixer_output_norm, self.mlp_output_norm = of_mixer, of_mlp  # registers them as modules
        self.output_norms = of_mixer, of_mlp

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
    """A whole model. `make_layer(index)` makes its layers, and `norm` the last norm.

    `local_rope`: the rotary embedding of layers that have their own; None without any.
    """

    norm: RMSNorm

    def __init__(
        self,
        config: DecoderConfig,
        factory: LayerFactory,
        context_length: int,
        make_layer: Callable[[int], Layer],
        norm: Callable[[BuildContext, int, float], RMSNorm] = RMSNorm,
        local_rope: RopeConfig | None = None,
    ) -> None:
        super().__init__(config, factory, context_length, make_layer, norm)
        self._embedding_multiplier = unless_one(config.embedding_multiplier)
        self._residual_multiplier = unless_one(config.residual_multiplier)
        self.cos_sin: Tensor
        self.local_cos_sin: Tensor
        for name, rope in (("cos_sin", config.rope), ("local_cos_sin", local_rope)):
            table = None if rope is None else cos_sin_table(rope, context_length).to(factory.context.device)
            self.register_buffer(name, table, persistent=False)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        mixers = (layer.mixer for layer in self.stack)
        return tuple(mixer.layer for mixer in mixers if not isinstance(mixer, StateLayer))

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual = self.embedded(inputs.tokens)
        x: Tensor | None = None
        for layer in self.stack:
            read, residual = joined(layer.attention_norm, x, residual)
            cos_sin = self.local_cos_sin if layer.has_local_rope else self.cos_sin
            mixed = self._scaled(layer.mix(read, inputs, cos_sin, context))
            read, residual = joined(layer.mlp_norm, mixed, residual)
            x = self._scaled(layer.feed(read))
        return joined(self.norm, x, residual)[0]

    def embedded(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden]: what the first layer reads."""
        looked_up: Tensor = self.lookup(tokens)
        return looked_up if self._embedding_multiplier is None else looked_up * self._embedding_multiplier

    def _scaled(self, output: Tensor) -> Tensor:
        """What a part adds to the residual."""
        return output if self._residual_multiplier is None else output * self._residual_multiplier

    def marked_modules(self) -> dict[str, nn.Module]:
        marked: dict[str, nn.Module] = {"model.embed_tokens": self.lookup, "lm_head": self.lm_head}
        for layer in self.stack:
            marked |= {f"{layer.prefix}.{layer.mixer_name}": layer.mixer, f"{layer.prefix}.mlp": layer.feed_forward}
        return marked

    def prepare_loaded(self) -> None:
        for module in self.modules():
            if isinstance(module, (UnitOffsetRMSNorm, StateLayer)):
                module.prepare_loaded()
