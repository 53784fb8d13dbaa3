"""The attention of native decoders. Must not know the KV pool: `context.attend` reads and writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from srv.models.architectures import parts
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.base import ForwardContext
from srv.models.formats.slices import Slice
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.norm import RMSNorm
from srv.platform.interface import OpArgs


class Attention(nn.Module):
    """Grouped-query attention, usually with rotary embeddings; queries, keys and values come from one fused matrix.

    `norm`: the class of the norms of queries and keys, in models that have them.
    """

    def __init__(
        self, config: DecoderConfig, factory: LayerFactory, prefix: str, index: int, norm: type[RMSNorm] = RMSNorm
    ) -> None:
        super().__init__()
        context, dim = factory.context, config.head_dim
        counts = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
        output_sizes = {f"{prefix}.{name}": count * dim for name, count in counts.items()}
        self.qkv_proj = factory.linear(output_sizes, config.hidden_size, config.qkv_bias, split="out", unit=dim)
        local = factory.local_sizes(output_sizes, config.hidden_size, "out", dim)
        self.head_counts = [outputs // dim for outputs in local.output_sizes.values()]
        self.total_heads = sum(self.head_counts)
        heads, kv_heads, _ = self.head_counts
        group, place = context.cache_place(index)
        layer = parts.attention(config, index).layer(index)
        first, end = context.group.share(config.heads)
        alibi = None if layer.alibi is None else layer.alibi[first:end]
        self.layer = dataclasses.replace(layer, index=place, group=group, heads=heads, kv_heads=kv_heads, alibi=alibi)
        output = {f"{prefix}.o_proj": config.hidden_size}
        self.o_proj = factory.linear(output, config.heads * dim, config.output_bias, split="in")
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self._wide_norms = config.wide_qk_norm
        if config.qk_norm:
            of_queries, of_keys = (config.heads * dim, config.kv_heads * dim) if self._wide_norms else (dim, dim)
            self.q_norm = norm(context, of_queries, config.norm_eps, with_residual=False)
            self.k_norm = norm(context, of_keys, config.norm_eps, with_residual=False)
        self._rotary: Callable[..., tuple[Tensor, Tensor]] | None = None
        if config.rotated[index]:
            sizes = {"head_dim": dim, "rotary_dim": config.rope.rotary_dim}
            self._rotary = context.ops.bind("rotary", OpArgs(context.dtype, sizes))
        self._unit_norm: RMSNorm | None = None
        if config.unit_rotated and config.rotated[index]:
            self._unit_norm = RMSNorm(context, dim, config.norm_eps, with_residual=False)
            self._unit_norm.weight.fill_(1)
        self.sinks = context.empty(heads) if config.sinks else None
        self.sink_slice = Slice(0, first, end, config.heads)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        context: ForwardContext,
        query_factors: Tensor | None = None,
    ) -> Tensor:
        """x [T, hidden], positions int64 [T], cos_sin float32 [P, rotary_dim] -> [T, hidden].

        query_factors: float32 [T, 1, 1], by which the queries of layers without rotary embeddings are multiplied.
        """
        layer = self.layer
        qkv = self.qkv_proj.kernel(x).reshape(-1, self.total_heads, layer.head_dim)
        q, k, v = qkv.split_with_sizes(self.head_counts, 1)
        q, k = self.normed(q, k)
        if self._rotary is not None:
            q, k = self._rotary(q, k, cos_sin, positions)
        else:
            q, k = q.contiguous(), k.contiguous()  # as backends receive them from the rotary op
        if self._unit_norm is not None:
            dim = layer.head_dim
            q = self._unit_norm.forward(q.reshape(-1, dim)).view(q.shape)
            k = self._unit_norm.forward(k.reshape(-1, dim)).view(k.shape)
        if query_factors is not None and self._rotary is None:
            q = (q * query_factors).to(q.dtype)
        attended = self.gated(x, context.attend(layer, q, k, v))
        return self.o_proj.kernel(attended.reshape(-1, layer.heads * layer.head_dim))

    def gated(self, x: Tensor, attended: Tensor) -> Tensor:
        """What the output projection reads, from x [T, hidden] and the result of attention [T, heads, D].

        Subclasses whose heads have gates override it.
        """
        return attended

    def weight_views(self, prefix: str) -> dict[str, Tensor]:
        """Views of the weights that belong to no projection, by their names in the checkpoint; `prefix`: its own."""
        views: dict[str, Tensor] = {}
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                views |= norm.weight_views(f"{prefix}.{name}")
        if self.sinks is not None:
            views[f"{prefix}.sinks"] = self.sinks
        return views

    def weight_slices(self, prefix: str) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that `weight_views` holds; of those that are not whole."""
        part = self.sink_slice
        return {f"{prefix}.sinks": part} if self.sinks is not None and part.end - part.begin < part.total else {}

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv_proj, self.o_proj

    def prepare_loaded(self) -> None:
        """Tell backends the loaded scores of sinks. Call it once after loading."""
        if self.sinks is not None:
            self.layer = dataclasses.replace(self.layer, sink_scores=tuple(self.sinks.float().tolist()))

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, D] and keys [T, kv_heads, D] after their norms, if the model has such norms.

        Both are views of the rows of one matrix. Subclasses with norms of another kind override it.
        """
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self._wide_norms:
            return self.q_norm.forward(q.flatten(1)).view(q.shape), self.k_norm.forward(k.flatten(1)).view(k.shape)
        heads, kv_heads, dim = self.layer.heads, self.layer.kv_heads, self.layer.head_dim
        return (
            self.q_norm.forward(q.reshape(-1, dim)).view(-1, heads, dim),
            self.k_norm.forward(k.reshape(-1, dim)).view(-1, kv_heads, dim),
        )
