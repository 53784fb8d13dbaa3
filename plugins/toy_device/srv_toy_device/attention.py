"""Paged attention for the toy device, written to be read: gather the pages, then an explicit softmax.

Rows of equal query length are computed together (all decoding rows are one such group), padded to the
group's longest context. A large group is split into tiles, so that the memory for gathered keys and for
scores has a bound, which `srv_toy_device.facts` reserves. Scores are float32, whatever the model's dtype.

    pool [pages + 1, page_size, kv_heads, head_dim], seen as slots [(pages + 1) * page_size, ...]

    slot of token t of a row = page_table[row, t // page_size] * page_size + t % page_size

A captured step (`AttentionBatch.graph`) calls the device's fused operator instead. It takes the lengths as host
integers, which `srv_toy_device.graphs` updates for each replay, and reads everything else at fixed addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv_toy_device.limits import GATHERED_TOKENS, SCORES_PER_HEAD, TRAITS


@dataclass(frozen=True, slots=True)
class Tile:
    """What is computed at once: a range of the query tokens of rows with one query length.

    tokens: int64 [rows * queries], indices of the query tokens in the step. slots: int64 [rows, keys], the pool
    slot of each key. positions: int64 [rows, queries], the position of each query token in its row.
    """

    rows: int
    queries: int
    tokens: Tensor
    slots: Tensor
    positions: Tensor

    def slots_read(self, window: int | None) -> Tensor:
        """`slots`, with the row's last token in place of those behind the window of its first query.

        They are masked all the same, but their pages may belong to other requests, whose memory may hold NaN, and NaN
        times a probability of zero is still NaN.
        """
        if window is None:
            return self.slots
        key = torch.arange(self.slots.shape[1], device=self.slots.device)
        return torch.where(key < self.positions[:, :1] - window + 1, self.slots[:, -1:], self.slots)

    def visible(self, window: int | None) -> Tensor:
        """bool [rows, 1, 1, queries, keys]: which keys each query attends to."""
        key = torch.arange(self.slots.shape[1], device=self.slots.device)
        distance = self.positions[:, :, None] - key
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        return visible[:, None, None]


@dataclass(frozen=True, slots=True)
class Metadata:
    """One step. new_slots: int64 [tokens], where the keys and values of its tokens are written."""

    new_slots: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class GraphMetadata:
    """A captured or replayed step: one new token per row. `new_slots` and `page_table` stay at their addresses."""

    new_slots: Tensor
    page_table: Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row on the host: its index in the batch, the index of its first query token, and its lengths."""

    index: int
    begin: int
    queries: int
    length: int


class ToyPagedAttention:
    """Implements `srv.platform.interface.AttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise ValueError("toy_paged attends over a KV pool, but none was allocated")
        self._device = context.device
        self._transfers = context.transfers
        self._page_size = context.kv.layout.page_size
        self._keys = [_as_slots(buffer) for buffer in context.kv.keys]
        self._values = [_as_slots(buffer) for buffer in context.kv.values]
        self._new_slots: dict[int, Tensor] = {}  # by the number of rows of the graph

    def supports(self, layer: AttentionLayer) -> str | None:
        return missing_traits(TRAITS, layer)  # it computes heads of any size

    def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
        if batch.graph is not None:
            return self._plan_graph(batch, batch.graph)
        rows: list[_Row] = []
        begin = 0
        for index, (queries, length) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            rows.append(_Row(index, begin, queries, length))
            begin += queries
        owners = [row.index for row in rows for _ in range(row.queries)]
        positions = [position for row in rows for position in range(row.length - row.queries, row.length)]
        return Metadata(
            new_slots=self._slots(batch.page_table, self._on_device(owners), self._on_device(positions)),
            tiles=tuple(
                self._tile(batch.page_table, group, first, last)
                for group in _groups(rows)
                for first, last in _query_ranges(group)
            ),
        )

    def _plan_graph(self, batch: AttentionBatch, count: int) -> GraphMetadata:
        if count not in self._new_slots:
            self._new_slots[count] = torch.zeros(count, dtype=torch.int64, device=self._device)
        new_slots = self._new_slots[count]
        last = self._on_device([length - 1 for length in batch.kv_lens])
        new_slots.copy_(self._slots(batch.page_table, self._on_device(list(range(count))), last))
        return GraphMetadata(new_slots, batch.page_table, tuple(batch.kv_lens))

    def _tile(self, page_table: Tensor, rows: list[_Row], first: int, last: int) -> Tile:
        """Queries `first` to `last` (exclusive) of each of `rows`, with the keys that any of them can see."""
        ends = [row.length - row.queries + last for row in rows]
        end = self._on_device(ends)[:, None]
        key = torch.arange(max(ends), device=self._device)
        return Tile(
            rows=len(rows),
            queries=last - first,
            tokens=self._on_device([row.begin + query for row in rows for query in range(first, last)]),
            # Past its end a row reads its own last token again, masked, for the same reason as in `slots_read`.
            slots=self._slots(
                page_table, self._on_device([row.index for row in rows])[:, None], torch.minimum(key, end - 1)
            ),
            positions=end - (last - first) + torch.arange(last - first, device=self._device),
        )

    def _slots(self, page_table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Pool slots of token positions; `rows` and `positions` broadcast."""
        pages = page_table[rows, positions // self._page_size].to(torch.int64)
        return pages * self._page_size + positions % self._page_size

    def _on_device(self, values: list[int]) -> Tensor:
        return self._transfers.upload_integers(values)

    def forward(
        self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: Metadata | GraphMetadata
    ) -> Tensor:
        keys, values = self._keys[layer.index], self._values[layer.index]
        keys.index_copy_(0, metadata.new_slots, k.to(keys.dtype))
        values.index_copy_(0, metadata.new_slots, v.to(values.dtype))
        if isinstance(metadata, GraphMetadata):
            return self._decode(layer, q, metadata)
        out = torch.empty_like(q)
        for tile in metadata.tiles:
            slots = tile.slots_read(layer.window)
            attended = _attend(layer, tile, q[tile.tokens], keys[slots], values[slots])
            out.index_copy_(0, tile.tokens, attended.to(out.dtype))
        return out

    def _decode(self, layer: AttentionLayer, q: Tensor, metadata: GraphMetadata) -> Tensor:
        out: Tensor = torch.ops.toy.paged_decode(
            q,
            self._keys[layer.index],
            self._values[layer.index],
            metadata.page_table,
            lengths=metadata.lengths,
            page_size=self._page_size,
            scale=layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
        )
        return out


def _groups(rows: list[_Row]) -> Iterator[list[_Row]]:
    """Groups of rows with one query length; a group of several rows gathers at most `GATHERED_TOKENS` keys."""
    by_queries: dict[int, list[_Row]] = defaultdict(list)
    for row in rows:
        by_queries[row.queries].append(row)
    for same_length in by_queries.values():
        group: list[_Row] = []
        longest = 0
        for row in sorted(same_length, key=lambda row: row.length):
            longest = max(longest, row.length)
            if group and (len(group) + 1) * longest > GATHERED_TOKENS:
                yield group
                group = []
            group.append(row)
        yield group


def _query_ranges(rows: list[_Row]) -> Iterator[tuple[int, int]]:
    """Ranges of query tokens with at most `SCORES_PER_HEAD` scores over all `rows`, but at least one token per row."""
    step = max(1, SCORES_PER_HEAD // (len(rows) * max(row.length for row in rows)))
    for first in range(0, rows[0].queries, step):
        yield first, min(first + step, rows[0].queries)


def _as_slots(buffer: Tensor) -> Tensor:
    """[pages + 1, page_size, kv_heads, head_dim] as [slots, kv_heads, head_dim], without copying."""
    return buffer.view(-1, buffer.shape[2], buffer.shape[3])


def _attend(layer: AttentionLayer, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention for one tile.

    q: [rows * queries, heads, head_dim]; k, v: [rows, keys, kv_heads, head_dim].
    Returns float32 [rows * queries, heads, head_dim]. Query heads h * n .. h * n + n - 1 share KV head h.
    """
    sharing = layer.heads // layer.kv_heads
    shape = (tile.rows, tile.queries, layer.kv_heads, sharing, layer.head_dim)
    query = q.float().view(shape).permute(0, 2, 3, 1, 4)
    key = k.float().permute(0, 2, 3, 1)[:, :, None]
    value = v.float().permute(0, 2, 1, 3)[:, :, None]
    scores = (query @ key) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(~tile.visible(layer.window), float("-inf"))
    attended = scores.softmax(dim=-1) @ value
    return attended.permute(0, 3, 1, 2, 4).reshape(-1, layer.heads, layer.head_dim)
