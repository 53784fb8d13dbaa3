"""Attention with a gate on its result (Qwen3-Next, Qwen3.5). Must not know the KV pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from srv.models.architectures import parts
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.base import ForwardContext
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.norm import UnitOffsetRMSNorm
from srv.platform.interface import OpArgs
from srv.specs import AttentionLayer


class GatedAttention(nn.Module):
    """Grouped-query attention whose result is multiplied by the sigmoid of a gate, which each query has beside it."""

    def __init__(self, config: DecoderConfig, factory: LayerFactory, prefix: str, index: int) -> None:
        super().__init__()
        context, dim = factory.context, config.head_dim
        group, place = context.cache_place(index)
        self.layer: AttentionLayer = dataclasses.replace(
            parts.attention(config, index).layer(index), index=place, group=group
        )
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

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv_proj, self.o_proj

    def weight_views(self, prefix: str) -> dict[str, Tensor]:
        """Views of the norms' weights; `prefix`: that of their names in the checkpoint."""
        return self.q_norm.weight_views(f"{prefix}.q_norm") | self.k_norm.weight_views(f"{prefix}.k_norm")
