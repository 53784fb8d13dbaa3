"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Must not know the KV pool, nor how a backend computes.

    hidden ─┬─ [down ─ norm ─] q ─────────────┬─ plain part ────────────┐
            │                                 └─ rotary ────────────────┤
            └─ kv_a ─┬─ norm ─ compressed vector, cached ───────────────┼─ attend (keys and values: kv_b) ─ o_proj
                     └─ rotary ─ one key that all heads share, cached ──┘

The rows of rotated dimensions are in the order of the `rotary` op, which pairs dimensions half their number apart;
checkpoints with adjacent pairs are reordered when they are loaded. In a layer with an indexer, its operands follow the
compressed vector in the second operand of `attend`. In layers with a gate, the result of attention is multiplied by
its sigmoid before o_proj; gate_proj computes the gate from the hidden states or, in A.X-K2, q_gate_proj beside each
query, from the compressed queries with and without their norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from srv.models.architectures.indexer import Indexer
from srv.models.architectures.latent_sizes import LatentSizes
from srv.models.base import ForwardContext
from srv.models.formats.slices import Slice
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.norm import RMSNorm
from srv.platform.interface import OpArgs


class LatentAttention(nn.Module):
    """Attention of one layer, or one rank's heads of it; compressed vectors are computed on every rank.

    `has_indexer`: False if it reads the keys that a layer before has chosen, in models with sparse attention.
    """

    def __init__(
        self, sizes: LatentSizes, factory: LayerFactory, prefix: str, index: int, has_indexer: bool = False
    ) -> None:
        super().__init__()
        context, dims = factory.context, sizes.dims
        self.dims = dims
        first, end = context.group.share(sizes.heads)
        heads, per_head = end - first, dims.key_dim + dims.value_dim
        group, place = context.cache_place(index)
        whole = sizes.part(has_indexer).layer(place)
        self.layer = dataclasses.replace(whole, heads=heads, group=group)
        self.indexer = Indexer(sizes, factory, f"{prefix}.indexer") if has_indexer else None
        self._gated_queries = sizes.gated_queries
        self._query_dim = sizes.query_dim
        self._head_parts = [dims.key_dim, dims.rope_dim, *([dims.value_dim] if sizes.gated_queries else [])]
        compressed = {f"{prefix}.kv_a_proj_with_mqa": dims.latent_dim + dims.rope_dim}
        self.q_norm: RMSNorm | None = None
        self._parts = [dims.latent_dim, dims.rope_dim]
        if sizes.query_rank is not None:
            compressed = {f"{prefix}.q_a_proj": sizes.query_rank, **compressed}
            self._parts = [sizes.query_rank, *self._parts]
            self.q_norm = RMSNorm(context, sizes.query_rank, sizes.norm_eps, with_residual=False)
        self.down_proj = factory.linear(compressed, sizes.hidden, sizes.bias)
        name, inputs = sizes.query_projection
        queries = {f"{prefix}.{name}": sizes.heads * sizes.query_dim}
        self.q_proj = factory.linear(queries, inputs, False, split="out", unit=sizes.query_dim)
        self.kv_norm = RMSNorm(context, dims.latent_dim, sizes.norm_eps, with_residual=False)
        self.up = context.empty(heads * per_head, dims.latent_dim)
        self._up_rows = Slice(0, first * per_head, end * per_head, sizes.heads * per_head)
        output = {f"{prefix}.o_proj": sizes.hidden}
        self.o_proj = factory.linear(output, sizes.heads * dims.value_dim, sizes.bias, split="in")
        self.gate_proj: Projection | None = None
        if sizes.gated:
            gate = {f"{prefix}.gate_proj": sizes.heads * dims.value_dim}
            self.gate_proj = factory.linear(gate, sizes.hidden, False, split="out", unit=dims.value_dim)
        self.sinks = context.empty(heads, dtype=torch.float32) if sizes.sinks else None
        self._sink_slice = Slice(0, first, end, sizes.heads)
        rotated = {"head_dim": dims.rope_dim, "rotary_dim": dims.rope_dim}
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = context.ops.bind("rotary", OpArgs(context.dtype, rotated))

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext) -> Tensor:
        """x [T, hidden], positions int64 [T], cos_sin float32 [P, rope_dim] -> [T, hidden]."""
        layer, dims = self.layer, self.dims
        down = self.down_proj.kernel(x)
        *queries, latent, rope = down.split_with_sizes(self._parts, 1)
        compressed_q = self.q_norm.forward(queries[0]) if self.q_norm is not None else x
        q = self.q_proj.kernel(torch.cat((compressed_q, *queries), 1) if self._gated_queries else compressed_q)
        plain, rotated, *gate = q.view(-1, layer.heads, self._query_dim).split_with_sizes(self._head_parts, 2)
        rotated, key = self._rotary(rotated, rope.unsqueeze(1), cos_sin, positions)
        compressed = self.kv_norm.forward(latent)
        if self.indexer is not None:
            compressed = torch.cat((compressed, self.indexer.forward(x, compressed_q, positions, cos_sin)), 1)
        attended = context.attend(layer, torch.cat((plain, rotated), -1), compressed.unsqueeze(1), key)
        attended = attended.reshape(-1, layer.heads * dims.value_dim)
        if gate:
            attended = (attended * gate[0].flatten(1).float().sigmoid()).to(attended.dtype)
        elif self.gate_proj is not None:
            attended = attended * self.gate_proj.kernel(x).sigmoid()
        return self.o_proj.kernel(attended)

    @property
    def up_projection(self) -> Tensor:
        """[heads, key_dim + value_dim, latent_dim]."""
        return self.up.view(self.layer.heads, -1, self.dims.latent_dim)

    @property
    def projections(self) -> tuple[Projection, ...]:
        own: tuple[Projection, ...] = self.down_proj, self.q_proj, self.o_proj
        own = own if self.gate_proj is None else (*own, self.gate_proj)
        return own if self.indexer is None else (*own, *self.indexer.projections)

    def prepare_loaded(self) -> None:
        """Tell backends the loaded scores of sinks; the up-projection, `LatentAttentionBackend.prepare` does."""
        if self.sinks is not None:
            self.layer = dataclasses.replace(self.layer, sink_scores=tuple(self.sinks.tolist()))

    def weight_views(self, prefix: str) -> dict[str, Tensor]:
        """See `srv.models.architectures.attention.Attention`."""
        views = {
            f"{prefix}.kv_b_proj.weight": self.up.detach(),
            **self.kv_norm.weight_views(f"{prefix}.kv_a_layernorm"),
        }
        if self.sinks is not None:
            views[f"{prefix}.sinks"] = self.sinks.detach()
        if self.indexer is not None:
            views |= self.indexer.weight_views(f"{prefix}.indexer")
        return views if self.q_norm is None else views | self.q_norm.weight_views(f"{prefix}.q_a_layernorm")

    def weight_slices(self, prefix: str) -> dict[str, Slice]:
        """See `srv.models.architectures.attention.Attention`."""
        rows = self._up_rows
        if rows.end - rows.begin == rows.total:
            return {}
        slices = {f"{prefix}.kv_b_proj.weight": rows}
        return slices if self.sinks is None else {**slices, f"{prefix}.sinks": self._sink_slice}
