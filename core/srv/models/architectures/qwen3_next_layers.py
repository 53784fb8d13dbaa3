"""The layers of Qwen3-Next: attention with a gate in some of them, the gated delta rule in the others.

    ─┬─ norm ─ attention or delta rule ─(+)─┬─ norm ─ MLP or experts ─(+)─ …
     └────────────── residual ──────────────┘└─────── residual ───────┘

Owns the order of computation and the names that checkpoints give to these weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.layer_stack import LayerStack, StackedLayer
from srv.models.architectures.qwen3_next import Qwen3NextConfig
from srv.models.base import ForwardContext, ModelInputs
from srv.models.formats.slices import Slice
from srv.models.layers.delta import GatedDeltaNet
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.moe import MoE
from srv.models.layers.norm import RMSNorm, UnitOffsetRMSNorm
from srv.models.layers.rope import cos_sin_table
from srv.platform.interface import OpArgs
from srv.specs import AttentionLayer


class GatedAttention(nn.Module):
    """Grouped-query attention whose result is multiplied by the sigmoid of a gate, which each query has beside it."""

    def __init__(self, config: DecoderConfig, factory: LayerFactory, prefix: str, index: int) -> None:
        super().__init__()
        context, dim = factory.context, config.head_dim
        group, place = context.cache_place(index)
        self.layer: AttentionLayer = dataclasses.replace(config.attention_layer(index), index=place, group=group)
        self._sizes = (2 * config.heads * dim, config.kv_heads * dim, config.kv_heads * dim)
        names = (f"{prefix}.{name}_proj" for name in "qkv")
        sizes = dict(zip(names, self._sizes, strict=True))
        self.qkv_proj = factory.linear(sizes, config.hidden_size, config.qkv_bias)
        self.o_proj = factory.linear({f"{prefix}.o_proj": config.hidden_size}, config.heads * dim, config.output_bias)
        self.q_norm = UnitOffsetRMSNorm(context, dim, config.norm_eps, with_residual=False)
        self.k_norm = UnitOffsetRMSNorm(context, dim, config.norm_eps, with_residual=False)
        rotary = OpArgs(context.dtype, {"head_dim": dim, "rotary_dim": config.rope.rotary_dim})
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = context.ops.bind("rotary", rotary)

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext) -> Tensor:
        """x [T, hidden], positions int64 [T], cos_sin float32 [P, rotary_dim] -> [T, hidden]."""
        layer, dim = self.layer, self.layer.head_dim
        queries, keys, values = self.qkv_proj.kernel(x).split_with_sizes(self._sizes, -1)
        q, gate = queries.reshape(-1, layer.heads, 2 * dim).chunk(2, -1)
        q = self.q_norm.forward(q.reshape(-1, dim)).view(-1, layer.heads, dim)
        k = self.k_norm.forward(keys.reshape(-1, dim)).view(-1, layer.kv_heads, dim)
        q, k = self._rotary(q, k, cos_sin, positions)
        attended = context.attend(layer, q, k, values.reshape(-1, layer.kv_heads, dim))
        return self.o_proj.kernel((attended * gate.sigmoid()).reshape(-1, layer.heads * dim))


class Qwen3NextLayer(StackedLayer):
    """One layer. `mixer`: what mixes tokens. Each output is added to the residual by the norm that follows."""

    feed_forward: GatedMLP | MoE

    def __init__(self, config: Qwen3NextConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.attention_norm = UnitOffsetRMSNorm(context, hidden, eps)
        self.mixer: GatedAttention | GatedDeltaNet
        if config.attends[index]:
            self.mixer = GatedAttention(sizes, factory, f"{self.prefix}.self_attn", index)
        else:
            self.mixer = GatedDeltaNet(factory, f"{self.prefix}.linear_attn", hidden, config.delta, eps, index)
        self.mlp_norm = UnitOffsetRMSNorm(context, hidden, eps)
        moe = config.moe_of(index)
        if moe is not None:
            self.feed_forward = MoE(factory, f"{self.prefix}.mlp", hidden, moe)
        else:
            self.feed_forward = GatedMLP(factory, f"{self.prefix}.mlp", hidden, sizes.intermediate_size, False)

    def mix(self, x: Tensor, inputs: ModelInputs, cos_sin: Tensor, context: ForwardContext) -> Tensor:
        if isinstance(self.mixer, GatedAttention):
            return self.mixer.forward(x, inputs.positions, cos_sin, context)
        return self.mixer.forward(x, context.states)

    def layer_norms(self) -> dict[str, RMSNorm]:
        norms = {"input_layernorm": self.attention_norm, "post_attention_layernorm": self.mlp_norm}
        if isinstance(self.mixer, GatedAttention):
            norms |= {"self_attn.q_norm": self.mixer.q_norm, "self_attn.k_norm": self.mixer.k_norm}
        return dict(norms)

    def weight_views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for name, norm in self.layer_norms().items():
            views |= norm.weight_views(f"{self.prefix}.{name}")
        if isinstance(self.mixer, GatedDeltaNet):
            views |= self.mixer.weight_views()
        for part in (*self._mixer_projections(), *self.feed_forward.projections):
            views |= part.weight_views()
        return views

    def weight_slices(self) -> dict[str, Slice]:
        """{}: the model is on one rank."""
        return {}

    def _mixer_projections(self) -> tuple[Projection, ...]:
        if isinstance(self.mixer, GatedDeltaNet):
            return self.mixer.projections
        return self.mixer.qkv_proj, self.mixer.o_proj


class Qwen3Next(LayerStack[Qwen3NextLayer]):
    """A whole model."""

    norm: RMSNorm

    def __init__(self, config: Qwen3NextConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(
            config.decoder,
            factory,
            context_length,
            lambda index: Qwen3NextLayer(config, factory, index),
            UnitOffsetRMSNorm,
        )
        self.cos_sin: Tensor
        table = cos_sin_table(config.decoder.rope, context_length).to(factory.context.device)
        self.register_buffer("cos_sin", table, persistent=False)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer.mixer.layer for layer in self.stack if isinstance(layer.mixer, GatedAttention))

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens)
        x: Tensor | None = None
        for layer in self.stack:
            if x is None:
                normed = layer.attention_norm.forward(residual)
            else:
                normed, residual = layer.attention_norm.add_and_norm(x, residual)
            mixed = layer.mix(normed, inputs, self.cos_sin, context)
            normed, residual = layer.mlp_norm.add_and_norm(mixed, residual)
            x = layer.feed_forward.forward(normed)
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add_and_norm(x, residual)[0]

    def marked_modules(self) -> dict[str, nn.Module]:
        marked: dict[str, nn.Module] = {"model.embed_tokens": self.lookup, "lm_head": self.lm_head}
        for layer in self.stack:
            name = "self_attn" if isinstance(layer.mixer, GatedAttention) else "linear_attn"
            marked |= {f"{layer.prefix}.{name}": layer.mixer, f"{layer.prefix}.mlp": layer.feed_forward}
        return marked

    def prepare_loaded(self) -> None:
        for module in self.modules():
            if isinstance(module, (UnitOffsetRMSNorm, GatedDeltaNet)):
                module.prepare_loaded()
