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
from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint.latent import Latent
from srv.models.checkpoints.slices import Slice
from srv.models.layers.linear import Projection
from srv.models.modules.indexer import Indexer
from srv.models.modules.mixer import Mixer
from srv.models.modules.norms import make_norm
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs


class LatentAttention(Mixer):
    """Attention of one layer, or one rank's heads of it; compressed vectors are computed on every rank."""

    def __init__(self, part: Latent, place: Place) -> None:
        super().__init__()
        context, dims, self.prefix = place.context, part.dims, place.prefix
        self.dims = dims
        first, end = context.group.share(part.heads)
        heads, per_head = end - first, dims.key_dim + dims.value_dim
        group, cached = context.cache_place(place.layer)
        self.layer = dataclasses.replace(part.layer(cached), heads=heads, group=group)
        self.indexer = None if part.indexer is None else Indexer(part, part.indexer, place.within(part.indexer))
        self._gated_queries, self._query_dim = part.gated_queries, part.queries.unit
        self._head_parts = [dims.key_dim, dims.rope_dim, *([dims.value_dim] if part.gated_queries else [])]
        self._parts = [*([] if part.query_norm is None else [part.query_norm.size]), dims.latent_dim, dims.rope_dim]
        self.q_norm = None if part.query_norm is None else make_norm(part.query_norm, place)
        self.down_proj, self.q_proj = place.linear(part.down), place.linear(part.queries)
        self.kv_norm = make_norm(part.latent_norm, place)
        self.up = context.empty(heads * per_head, dims.latent_dim)
        self._up_rows = Slice(0, first * per_head, end * per_head, part.heads * per_head)
        self.o_proj = place.linear(part.output)
        self.gate_proj: Projection | None = None if part.gate is None else place.linear(part.gate)
        self.sinks = None if part.sinks is None else context.empty(heads, dtype=torch.float32)
        self._sink_slice = Slice(0, first, end, part.heads)
        self.cos_sin = place.tables.rotary(part.rope)
        rotated = {"head_dim": dims.rope_dim, "rotary_dim": dims.rope_dim}
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = context.ops.bind("rotary", OpArgs(context.dtype, rotated))

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        layer, dims, cos_sin, positions = self.layer, self.dims, self.cos_sin, inputs.positions
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

    def prepare_loaded(self) -> None:
        """Tell backends the loaded scores of sinks; the up-projection, `LatentAttentionBackend.prepare` does."""
        if self.sinks is not None:
            self.layer = dataclasses.replace(self.layer, sink_scores=tuple(self.sinks.tolist()))

    def weight_views(self) -> dict[str, Tensor]:
        views = {f"{self.prefix}.kv_b_proj.weight": self.up.detach()}
        return views if self.sinks is None else {**views, f"{self.prefix}.sinks": self.sinks.detach()}

    def weight_slices(self) -> dict[str, Slice]:
        rows = self._up_rows
        if rows.end - rows.begin == rows.total:
            return {}
        slices = {f"{self.prefix}.kv_b_proj.weight": rows}
        return slices if self.sinks is None else {**slices, f"{self.prefix}.sinks": self._sink_slice}
