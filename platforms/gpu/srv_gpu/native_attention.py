"""Attention with PyTorch's operators: gather the pages of a few rows, then scaled dot-product attention.

It runs wherever torch does and needs no compiler, so that it is the fallback. Rows with one query length are computed
together, padded to the longest of their contexts, in tiles of bounded size:

    keys [rows, longest, kv_heads, dim] gathered from pool slots ─► SDPA with a mask ─► [rows, queries, heads, dim]
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from srv.errors import InternalError
from srv.platform.both_ways import attend_both_ways, unsupported
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv.platform.pools import is_float8, round_to_float8
from srv_gpu.facts import TORCH_TRAITS
from srv_gpu.per_head import PerHead
from srv_gpu.platform import hardware_of
from srv_gpu.step import Step, StepPlanner, gather

_GATHERED_TOKENS = 1 << 16  # of a tile's keys
_SCORES = 1 << 22  # of a tile, per head


@dataclass(frozen=True, slots=True)
class _Row:
    """Index in the batch, first query token, and lengths."""

    index: int
    begin: int
    queries: int
    length: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """Query tokens of rows with one query length.

    tokens: int64 [rows * queries]. slots: int64 [rows, keys], where the keys are. positions: int64 [rows, queries].
    """

    rows: int
    queries: int
    tokens: Tensor
    slots: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class _Metadata:
    """`begins`: of the rows in the token axis, and the end; with `lengths`, all that bidirectional layers need."""

    begins: Sequence[int]
    lengths: Sequence[int]
    step: Step | None
    tiles: tuple[_Tile, ...]


class NativeAttention:
    """The "torch_native" attention backend. Implements `srv.platform.interface.AttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend torch_native needs a KV pool, but none was allocated")
        self._page_size = context.kv.layout.page_size
        self._transfers = context.transfers
        self._planner = StepPlanner(self._page_size, context.device, context.transfers)
        self._keys, self._values = context.kv.keys, context.kv.values
        self._float8 = is_float8(context.kv.layout.dtype)
        self._scales = tuple(context.kv.scales(index) for index in range(len(self._keys)))
        self._write_kv = hardware_of(context).write_kv
        self.kv_writer = hardware_of(context).kv_writer
        self._per_head = PerHead(context.transfers)

    def supports(self, layer: AttentionLayer) -> str | None:
        return missing_traits(TORCH_TRAITS, layer) or unsupported(layer)  # it computes heads of any size

    def plan(self, batch: AttentionBatch) -> _Metadata:
        """See `srv.platform.interface.AttentionBackend`."""
        if batch.graph is not None:
            raise InternalError("the shapes of torch_native depend on lengths, so that its steps cannot be captured")
        begins = np.cumsum([0, *batch.query_lens]).tolist()
        if not self._keys:  # of an encoder: its layers have no place in the pool
            return _Metadata(begins, batch.kv_lens, None, ())
        lengths = zip(begins, batch.query_lens, batch.kv_lens, strict=False)
        rows = [_Row(index, *sizes) for index, sizes in enumerate(lengths)]
        tiles = tuple(
            self._tile(batch.page_table, group, first, last)
            for group in _groups(rows)
            for first, last in _query_ranges(group)
        )
        return _Metadata(begins, batch.kv_lens, self._planner.plan(batch), tiles)

    def _tile(self, page_table: Tensor, rows: list[_Row], first: int, last: int) -> _Tile:
        """Queries `first` to `last` (exclusive) of each of `rows`, with the keys that any of them sees.

        Past its end a row reads its last token again, masked: other slots may hold NaN, and 0 x NaN is NaN.
        """
        ends = np.array([row.length - row.queries + last for row in rows])[:, None]
        indices = np.array([row.index for row in rows])[:, None]
        keys = np.minimum(np.arange(int(ends.max())), ends - 1)
        tokens = np.concatenate([np.arange(row.begin + first, row.begin + last) for row in rows])
        where = self._transfers.upload(np.stack((np.broadcast_to(indices, keys.shape), keys)))
        pages = page_table[where[0], where[1] // self._page_size].long()
        return _Tile(
            rows=len(rows),
            queries=last - first,
            tokens=self._transfers.upload(tokens),
            slots=pages * self._page_size + where[1] % self._page_size,
            positions=self._transfers.upload(ends - (last - first) + np.arange(last - first)),
        )

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: _Metadata) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        if layer.bidirectional:
            return attend_both_ways(layer, q, k, v, metadata.begins, metadata.lengths)
        assert metadata.step is not None
        keys, values = self._keys[layer.index], self._values[layer.index]
        key_scale, value_scale = self._scales[layer.index]
        if self._float8:
            k, v = round_to_float8(k, keys.dtype, key_scale), round_to_float8(v, values.dtype, value_scale)
            layer = replace(layer, scale=layer.scale * key_scale)
            # As pairs of bytes: not every GPU can write 8-bit floats.
            pairs = (x.view(torch.float16) for x in (k, v, keys, values))
            self._write_kv(*pairs, metadata.step.slots)
        else:
            self._write_kv(k, v, keys, values, metadata.step.slots)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # [slots, kv_heads, dim]
        out = q.new_empty(q.shape[0], layer.heads, v.shape[-1])
        slopes, sinks = self._per_head.upload(layer.alibi), self._per_head.upload(layer.sink_scores)
        for tile in metadata.tiles:
            queries = q.index_select(0, tile.tokens)
            out.index_copy_(0, tile.tokens, _attend(layer, tile, queries, keys, values, slopes, sinks))
        return out.mul_(value_scale) if self._float8 else out


def _groups(rows: list[_Row]) -> Iterator[list[_Row]]:
    """Groups of rows with one query length, by context; a group of several gathers at most `_GATHERED_TOKENS` keys."""
    by_queries: dict[int, list[_Row]] = defaultdict(list)
    for row in rows:
        by_queries[row.queries].append(row)
    for same in by_queries.values():
        group: list[_Row] = []
        for row in sorted(same, key=lambda row: row.length):
            if group and (len(group) + 1) * row.length > _GATHERED_TOKENS:
                yield group
                group = []
            group.append(row)
        yield group


def _query_ranges(rows: list[_Row]) -> Iterator[tuple[int, int]]:
    """Ranges of query tokens with at most `_SCORES` scores per head over all `rows`, but at least one token."""
    step = max(1, _SCORES // (len(rows) * rows[-1].length))
    for first in range(0, rows[0].queries, step):
        yield first, min(first + step, rows[0].queries)


def _attend(
    layer: AttentionLayer,
    tile: _Tile,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [rows * queries, heads, dim] -> [rows * queries, heads, value_dim].

    slopes, sinks: of ALiBi, and the scores of attention sinks, float32 [heads].
    """
    key_positions = torch.arange(tile.slots.shape[1], device=q.device)
    distance = tile.positions[:, :, None] - key_positions
    visible, slots = distance >= 0, tile.slots
    if layer.window is not None or layer.chunk is not None:
        first = _first_visible(layer, tile.positions)
        visible &= key_positions >= first[:, :, None]
        # Pages before these keys may belong to other requests, whose memory may hold NaN.
        slots = torch.where(key_positions < first[:, :1], slots[:, -1:], slots)
    shape = (*slots.shape, layer.kv_heads, -1)
    key, value = (gather(pool, slots).view(shape).to(q.dtype) for pool in (keys, values))
    group = layer.heads // layer.kv_heads
    # Query heads that share a KV head are stacked in the query axis, so that keys are not copied per head.
    query = q.view(tile.rows, tile.queries, layer.kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = visible[:, None].repeat(1, 1, group, 1)
    bias = None
    if slopes is not None:  # in float32: half precision would round that of far keys by several units
        bias = -distance[:, None, None] * slopes.view(layer.kv_heads, group, 1, 1)
        bias = bias.flatten(2, 3)
    if sinks is not None:  # as a column of the scores
        sinks = sinks.view(layer.kv_heads, group, 1).expand(-1, -1, tile.queries).reshape(layer.kv_heads, -1, 1)
    temperature = None
    if layer.temperature_from is not None:
        factors = tile.positions.float().clamp(min=layer.temperature_from).log() / math.log(layer.temperature_from)
        temperature = factors[:, None].repeat(1, 1, group).unsqueeze(-1)  # [rows, 1, group * queries, 1]
    changes = bias, temperature, sinks
    out = _scaled_dot_product(layer, query, key.transpose(1, 2), value.transpose(1, 2), mask, *changes)
    out = out.view(tile.rows, layer.kv_heads, group, tile.queries, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(tile.rows * tile.queries, layer.heads, -1)


def _first_visible(layer: AttentionLayer, positions: Tensor) -> Tensor:
    """The position of the first key that a query at each position sees, which may be negative."""
    first = torch.zeros_like(positions) if layer.window is None else positions - layer.window + 1
    return first if layer.chunk is None else torch.maximum(first, positions // layer.chunk * layer.chunk)


def _scaled_dot_product(
    layer: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    if layer.soft_cap is None and bias is None and temperature is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.scale)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * (layer.scale / (layer.soft_cap or 1.0))
    if layer.soft_cap is not None:
        scores = scores.tanh() * layer.soft_cap
    if temperature is not None:
        scores = scores * temperature
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(len(scores), -1, -1, -1)), -1)
    return torch.matmul(scores.softmax(-1)[..., : key.shape[2]].to(query.dtype), value)
