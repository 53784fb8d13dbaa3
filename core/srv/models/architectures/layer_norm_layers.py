"""The layers of decoders with LayerNorm, in sequence or in parallel.

    in sequence    ─┬─ norm ─ attention ─(+)─┬─ norm ─ MLP ─(+)─ …
                    └────── residual ────────┘└─ residual ──┘

    in parallel    ─┬─ norm ─┬─ attention ─(+)─(+)─ …        the MLP may have a norm of its own
                    │        └─ MLP ────────┘   │
                    └────────── residual ───────┘

Owns the order of computation and the names of the weights: checkpoints that have others state them
(`srv.models.formats.stored_weights`). Sharded over ranks, parallel layers add up partial sums once, the others twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from srv.models.architectures.attention import Attention
from srv.models.architectures.layer_norm_config import LayerNormConfig
from srv.models.architectures.layer_stack import LayerStack, StackedLayer
from srv.models.base import ForwardContext, ModelInputs
from srv.models.formats.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP, PlainMLP
from srv.models.layers.norm import LayerNorm, Norm
from srv.models.layers.op_layer import TORCH
from srv.models.layers.rope import cos_sin_table
from srv.platform.interface import OpArgs

_SINUSOIDAL_BASE = 10000.0


class HeadNorms(nn.Module):
    """A LayerNorm without bias for each of several heads: weights [heads, dim], `joint` in a checkpoint or not."""

    def __init__(self, context: BuildContext, heads: int, dim: int, eps: float, joint: bool) -> None:
        super().__init__()
        self.joint = joint
        self.weight, self.eps, self.dim = context.empty(heads, dim), eps, (dim,)
        context.ops.note_own("layer_norm", OpArgs(context.dtype, {"dim": dim}), TORCH)

    def forward(self, x: Tensor) -> Tensor:
        """[T, heads, dim] -> [T, heads, dim]."""
        return nn.functional.layer_norm(x, self.dim, None, None, self.eps) * self.weight

    def weight_views(self, name: str) -> dict[str, Tensor]:
        if self.joint:
            return {f"{name}_norm.weight": self.weight}
        return {f"{name}_layernorm.norms.{head}.weight": weight for head, weight in enumerate(self.weight)}


class HeadNormedAttention(Attention):
    """Attention whose query and key heads each have a norm of their own."""

    def __init__(self, config: LayerNormConfig, factory: LayerFactory, prefix: str, index: int) -> None:
        sizes, context = config.decoder, factory.context
        super().__init__(sizes, factory, prefix, index)
        dim, eps, joint = sizes.head_dim, sizes.norm_eps, config.joint_head_norms
        self.query_norms = HeadNorms(context, sizes.heads, dim, eps, joint)
        self.key_norms = HeadNorms(context, sizes.kv_heads, dim, eps, joint)

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norms.forward(q), self.key_norms.forward(k)


class LayerNormLayer(StackedLayer):
    """One layer. Without a norm of its own, the MLP reads the norm before attention."""

    def __init__(self, config: LayerNormConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes = config.decoder
        self.parallel, self.residual_of_norm = config.parallel, config.residual_of_norm
        self.prefix = f"model.layers.{index}"
        attention, mlp = f"{self.prefix}.self_attn", f"{self.prefix}.mlp"
        self.attention_norm = _norm(config, factory.context)
        self.attention: Attention
        if config.head_norms:
            self.attention = HeadNormedAttention(config, factory, attention, index)
        else:
            self.attention = Attention(sizes, factory, attention, index)
        self.mlp_norm = _norm(config, factory.context) if config.separate_norms else None
        widths = (sizes.hidden_size, sizes.intermediate_size)
        self.mlp: GatedMLP | PlainMLP
        if config.mlp == "silu_gated":
            self.mlp = GatedMLP(factory, mlp, *widths, sizes.mlp_bias)
        else:
            self.mlp = PlainMLP(factory, mlp, *widths, sizes.mlp_bias, config.mlp)

    def layer_norms(self) -> Mapping[str, Norm]:
        first: dict[str, Norm] = {"input_layernorm": self.attention_norm}
        return first if self.mlp_norm is None else {**first, "post_attention_layernorm": self.mlp_norm}

    def weight_views(self) -> dict[str, Tensor]:
        views, attention = super().weight_views(), self.attention
        if isinstance(attention, HeadNormedAttention):
            views |= attention.query_norms.weight_views(f"{self.prefix}.self_attn.q")
            views |= attention.key_norms.weight_views(f"{self.prefix}.self_attn.k")
        return views

    def forward(
        self,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        context: ForwardContext,
        add_up: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """residual [T, hidden] -> [T, hidden], the residual of the next layer. add_up: that of the `LayerStack`."""
        normed = self.attention_norm.forward(residual)
        attended = self.attention.forward(normed, positions, cos_sin, context)
        if self.parallel:
            own = normed if self.mlp_norm is None else self.mlp_norm.forward(residual)
            return residual + add_up(attended + self.mlp.forward(own))
        residual = (normed if self.residual_of_norm else residual) + add_up(attended)
        assert self.mlp_norm is not None
        normed = self.mlp_norm.forward(residual)
        return (normed if self.residual_of_norm else residual) + add_up(self.mlp.forward(normed))


class LayerNormDecoder(LayerStack[LayerNormLayer]):
    """A whole model, or one rank's part."""

    def __init__(self, config: LayerNormConfig, factory: LayerFactory, context_length: int) -> None:
        sizes, context = config.decoder, factory.context
        super().__init__(
            sizes,
            factory,
            context_length,
            lambda index: LayerNormLayer(config, factory, index),
            lambda context, dim, eps: LayerNorm(context, dim, eps, config.norm_bias),
        )
        self.embedding_norm = _norm(config, context) if config.embedding_norm else None
        self._multiplier = None if sizes.embedding_multiplier == 1.0 else sizes.embedding_multiplier
        self._vocab = factory.local_vocab(sizes.vocab_size)
        self.logits_bias = context.empty(self._vocab.end - self._vocab.begin) if config.logits_bias else None
        self.cos_sin: Tensor
        table = cos_sin_table(sizes.rope, context_length if any(sizes.rotated) else 0)
        self.register_buffer("cos_sin", table.to(context.device), persistent=False)
        self.learned = config.learned
        rows = 0 if config.learned is None else config.learned.rows
        self.position_embedding = context.empty(rows, sizes.hidden_size) if rows else None
        self.added_positions: Tensor | None
        added = None if config.sinusoidal is None else _sinusoidal(context_length, sizes.hidden_size, config.sinusoidal)
        self.register_buffer(
            "added_positions", None if added is None else added.to(context.device, context.dtype), persistent=False
        )

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens)
        if self._multiplier is not None:
            residual = residual * self._multiplier
        if self.added_positions is not None:
            residual = residual + self.added_positions.index_select(0, inputs.positions)
        if self.position_embedding is not None and self.learned is not None:
            residual = residual + self.position_embedding[self.learned.first :].index_select(0, inputs.positions)
        if self.embedding_norm is not None:
            residual = self.embedding_norm.forward(residual)
        for layer in self.stack:
            residual = layer.forward(residual, inputs.positions, self.cos_sin, context, self.add_up)
        return self.norm.forward(residual)

    def local_logits(self, hidden: Tensor) -> Tensor:
        logits = super().local_logits(hidden)
        return logits if self.logits_bias is None else logits + self.logits_bias

    def weight_views(self) -> dict[str, Tensor]:
        views = super().weight_views()
        if self.embedding_norm is not None:
            views |= self.embedding_norm.weight_views("model.embed_norm")
        if self.position_embedding is not None:
            views["model.embed_positions.weight"] = self.position_embedding
        return views if self.logits_bias is None else {**views, "lm_head.bias": self.logits_bias}

    def weight_slices(self) -> dict[str, Slice]:
        slices = super().weight_slices()
        return slices if self.logits_bias is None else {**slices, "lm_head.bias": self._vocab}


def _norm(config: LayerNormConfig, context: BuildContext) -> LayerNorm:
    return LayerNorm(context, config.decoder.hidden_size, config.decoder.norm_eps, config.norm_bias)


def _sinusoidal(positions: int, dim: int, first: int) -> Tensor:
    """float32 [positions, dim]: sines, then cosines, of position `first` and those that follow.

    The frequencies fall from 1 to 1 / 10000, as in tensor2tensor: Vaswani et al. 2017 (arXiv:1706.03762) use slightly
    other ones.
    """
    half = dim // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(_SINUSOIDAL_BASE) / (half - 1)))
    angles = torch.outer(torch.arange(first, first + positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=1)
