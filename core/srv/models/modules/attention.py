"""Grouped-query attention. Must not know the KV pool: `context.attend` reads and writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from srv.models import blueprint
from srv.models.base import ForwardContext, ModelInputs
from srv.models.checkpoints.slices import Slice
from srv.models.layers.linear import Projection
from srv.models.layers.norm import Norm
from srv.models.modules.mixer import Mixer
from srv.models.modules.norms import DividedNorms, HeadNorms, make_norm
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs


class Attention(Mixer):
    """Usually with rotary embeddings; queries, keys and values come from one fused matrix."""

    def __init__(self, part: blueprint.Attention, place: Place) -> None:
        super().__init__()
        context, dim, self.prefix = place.context, part.head_dim, place.prefix
        first, end = context.group.share(part.heads)
        group, cached = context.cache_place(place.layer)
        heads, (kv_first, kv_end) = end - first, context.group.share(part.kv_heads)
        self.layer = dataclasses.replace(
            part.layer(cached),
            group=group,
            heads=heads,
            kv_heads=kv_end - kv_first,
            alibi=None if part.alibi is None else part.alibi[first:end],
        )
        self.qkv_proj, self.o_proj = place.linear(part.qkv), place.linear(part.output)
        self.head_counts = [heads * (1 + part.gated_queries), *[kv_end - kv_first] * (2 - part.keys_are_values)]
        self.total_heads = sum(self.head_counts)
        self.divided_norms = DividedNorms.of(part, place)
        divides = self.divided_norms is not None
        self.q_norm, self.k_norm = (None if divides else _head_norm(norm, place) for norm in (part.q_norm, part.k_norm))
        self._norms_rotated = part.norms_rotated
        self.v_norm = None if part.v_norm is None else make_norm(part.v_norm, place)
        self._number = place.layer if part.kept else None  # of the layer, if higher ones attend with its keys
        self._joint_norms = part.q_norm is not None and part.q_norm.size != dim  # over all heads together
        self._rotary: Callable[..., tuple[Tensor, Tensor]] | None = None
        if part.rope is not None:
            sizes = {"head_dim": dim, "rotary_dim": part.rope.rotary_dim}
            self._rotary = context.ops.bind("rotary", OpArgs(context.dtype, sizes))
            self.cos_sin = place.tables.rotary(part.rope)
        self._unit_norm = None if part.unit_norm is None else make_norm(part.unit_norm, place)
        temperature = part.temperature
        self.query_factors = None if temperature is None else place.tables.query_factors(temperature)
        self._gated_queries, self._bidirectional, self._clip = part.gated_queries, part.bidirectional, part.clip
        self.gate_proj: Projection | None = None if part.gate is None else place.linear(part.gate)
        self.sinks = None if part.sinks is None else context.empty(heads)
        self._sink_slice = Slice(0, first, end, part.heads)

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        layer, gate = self.layer, None
        q, k, v = self.project(x)
        if self._gated_queries:
            q, gate = q.view(-1, layer.heads, 2, layer.head_dim).unbind(2)
        if not self._norms_rotated:
            q, k = self._normed(q, k)
        if self.v_norm is not None:
            v = self._norm_of(self.v_norm, v)
        if self._clip is not None:
            q, k, v = (each.clamp(-self._clip, self._clip) for each in (q, k, v))
        if self._rotary is not None:
            q, k = self._rotary(q, k, self.cos_sin, inputs.positions)
        elif not self._bidirectional:
            q, k = q.contiguous(), k.contiguous()  # as backends receive them from the rotary op
        if self._norms_rotated:
            q, k = self._normed(q, k)
        if self._unit_norm is not None:
            dim = layer.head_dim
            q = self._unit_norm.forward(q.reshape(-1, dim)).view(q.shape)
            k = self._unit_norm.forward(k.reshape(-1, dim)).view(k.shape)
        if self.query_factors is not None:
            q = (q * self.query_factors.index_select(0, inputs.positions)).to(q.dtype)
        if self._number is not None and context.kept is not None:
            context.kept[self._number] = k, v
        attended = context.attend(layer, q, k, v)
        if gate is not None:
            attended = attended * gate.sigmoid()
        elif self.gate_proj is not None:
            attended = attended * self.gate_proj.kernel(x).sigmoid().view(*attended.shape[:2], -1)
        return self.o_proj.kernel(attended.reshape(len(x), -1))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [T, heads, D] each; gates, if there are any, are heads of queries."""
        qkv = self.qkv_proj.kernel(x).reshape(-1, self.total_heads, self.layer.head_dim)
        q, k, *values = qkv.split_with_sizes(self.head_counts, 1)
        return q, k, values[0] if values else k

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.divided_norms is not None:
            return self.divided_norms.forward(q, k)
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self._norm_of(self.q_norm, q), self._norm_of(self.k_norm, k)

    def _norm_of(self, norm: Norm | HeadNorms, x: Tensor) -> Tensor:
        """Queries or keys [T, heads, D], which are views of the rows of one matrix, after their norm."""
        if isinstance(norm, HeadNorms):
            return norm.forward(x)
        if self._joint_norms:
            return norm.forward(x.flatten(1)).view(x.shape)
        return norm.forward(x.reshape(-1, x.shape[-1])).view(x.shape)

    def weight_views(self) -> dict[str, Tensor]:
        return {} if self.sinks is None else {f"{self.prefix}.sinks": self.sinks}

    def weight_slices(self) -> dict[str, Slice]:
        part = self._sink_slice
        return {f"{self.prefix}.sinks": part} if self.sinks is not None and part.end - part.begin < part.total else {}

    def prepare_loaded(self) -> None:
        """Tell backends the loaded scores of sinks."""
        if self.sinks is not None:
            self.layer = dataclasses.replace(self.layer, sink_scores=tuple(self.sinks.float().tolist()))


def _head_norm(part: blueprint.Norm | blueprint.HeadNorms | None, place: Place) -> Norm | HeadNorms | None:
    if part is None:
        return None
    return HeadNorms(part, place) if isinstance(part, blueprint.HeadNorms) else make_norm(part, place)
