"""Attention on the host with torch operators, over the paged KV pool.

Owns reading and writing the pool's buffers; the batch says which pages belong to which row. Everything that depends
only on lengths and pages is computed once per step, in `plan`; a layer then writes, gathers and attends in about six
torch operators per group.

    rows with one query        sorted by length, divided into groups of similar length, padded to the longest:
                               q [rows, kv_heads, group, dim] x K [rows, kv_heads, longest, dim], one call
    rows with more queries     one row at a time, in blocks of queries, each with the keys that are visible to it:
                               q [kv_heads, group, block, dim] x K [kv_heads, 1 (expanded), visible, dim]

Query heads that share a KV head are stacked in the query axis, or use an expanded key, so that K and V are not copied
(torch's `enable_gqa` copies them: four to six times slower in bfloat16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv_cpu.host import threads

_GROUP_COST = 256  # padded tokens that cost as much as another call
_GROUP_TOKENS = 8192  # gathered tokens per call: bounds the workspace, so that it fits the caches
_QUERY_BLOCK = 256  # queries per masked call: bounds the mask and the masked scores


@dataclass(frozen=True, slots=True)
class _Slots:
    """Pool slots to read: `indices`, int64 [n]; `start` is set if they are consecutive."""

    count: int
    start: int | None
    indices: Tensor

    @classmethod
    def of(cls, indices: Tensor, maybe_consecutive: bool) -> _Slots:
        consecutive = maybe_consecutive and bool((indices.diff() == 1).all())
        return cls(indices.shape[0], int(indices[0]) if consecutive else None, indices)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one query each. `tokens`: their indices in the token axis; None: all tokens, in order.

    `slots`: [rows x longest] pool slots to read; `mask`: 0 or -inf, [rows, 1, 1, longest], None if all rows have the
    same length.
    """

    rows: int
    longest: int
    tokens: Tensor | None
    slots: _Slots
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries [begin, end) of a row with its gathered keys [first, last). `mask`: [queries, keys] or None."""

    begin: int
    end: int
    first: int
    last: int
    causal: bool
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _ExtendRow:
    """A row with several queries: tokens [begin, end) of the step.

    `slots`: what to read; None: the row has no keys besides those of this step.
    """

    begin: int
    end: int
    slots: _Slots | None
    blocks: tuple[_Block, ...]


@dataclass(frozen=True, slots=True)
class _ReadPlan:
    """What layers of one window read in this step."""

    decode: tuple[_DecodeGroup, ...]
    extend: tuple[_ExtendRow, ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The batch, and the offsets of its rows in the token axis (cumulative query lengths)."""

    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    begins: Sequence[int]
    page_table: Tensor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's metadata: the slot that each token is written to and, per window size, the slots to read."""

    tokens: int
    written: Tensor  # int64 [tokens]
    rows: _Rows
    read_plans: dict[int | None, _ReadPlan] = field(default_factory=dict)


class TorchNativeAttention:
    """The "torch_native" attention backend of the CPU platform. Any page size, head size and float dtype."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend torch_native was built without a KV pool; it needs one")
        self._page_size = context.kv.layout.page_size
        self._dtype = context.kv.keys[0].dtype
        self._keys = tuple(buffer.flatten(0, 1) for buffer in context.kv.keys)  # [slots, kv_heads, dim]
        self._values = tuple(buffer.flatten(0, 1) for buffer in context.kv.values)
        self._key_workspace = _Workspace(self._dtype)
        self._value_workspace = _Workspace(self._dtype)
        torch.set_num_threads(threads())  # with native linear layers torch has one thread: see `post_load`

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        return None

    # Planning, once per step

    def plan(self, batch: AttentionBatch) -> StepPlan:
        """See `srv.platform.interface.AttentionBackend`."""
        begins = [0]
        for length in batch.query_lens:
            begins.append(begins[-1] + length)
        kv_lens = batch.kv_lens if batch.lengths is None else batch.lengths.tolist()  # the host is the device
        rows = _Rows(batch.query_lens, kv_lens, begins, batch.page_table.long())
        return StepPlan(begins[-1], self._written(rows), rows)

    def _written(self, rows: _Rows) -> Tensor:
        """Pool slot of every token of the step."""
        queries = torch.tensor(rows.query_lens)
        kv_lens = torch.tensor(rows.kv_lens)
        if len(rows.query_lens) == rows.begins[-1]:
            return self._slots(rows, torch.arange(len(queries)), kv_lens - 1)
        owner = torch.arange(len(queries)).repeat_interleave(queries)
        offset = torch.tensor(rows.begins[1:]) - kv_lens
        return self._slots(rows, owner, torch.arange(rows.begins[-1]) - offset[owner])

    def _slots(self, rows: _Rows, owner: Tensor | int, positions: Tensor) -> Tensor:
        """Pool slots of positions in rows; `owner`, the row indices, is broadcast with `positions`."""
        if self._page_size == 1:
            return rows.page_table[owner, positions]
        pages = rows.page_table[owner, positions // self._page_size]
        return pages * self._page_size + positions % self._page_size

    def _read_plan(self, plan: StepPlan, window: int | None) -> _ReadPlan:
        """What layers with this window read; computed by the first such layer of a step."""
        read_plan = plan.read_plans.get(window)
        if read_plan is None:
            rows = plan.rows
            short = [row for row, length in enumerate(rows.query_lens) if length == 1]
            read_plan = plan.read_plans[window] = _ReadPlan(
                tuple(self._decode_group(rows, group, window) for group in _groups(rows, short, window)),
                tuple(self._extend_row(rows, row, window) for row, length in enumerate(rows.query_lens) if length > 1),
            )
        return read_plan

    def _decode_group(self, rows: _Rows, group: list[int], window: int | None) -> _DecodeGroup:
        lengths = torch.tensor([_visible(rows.kv_lens[row], window) for row in group]).unsqueeze(1)
        ends = torch.tensor([rows.kv_lens[row] for row in group]).unsqueeze(1)
        longest = int(lengths.max())
        # Padding repeats the row's last token. Other slots may contain values that are not finite, and 0 x NaN is NaN.
        positions = torch.minimum(ends - lengths + torch.arange(longest), ends - 1)
        slots = self._slots(rows, torch.tensor(group).unsqueeze(1), positions).flatten()
        padding = torch.arange(longest) >= lengths
        mask = None
        if bool(padding.any()):
            mask = torch.zeros(padding.shape, dtype=self._dtype).masked_fill_(padding, float("-inf"))[:, None, None]
        all_tokens = group == list(range(rows.begins[-1]))
        return _DecodeGroup(
            rows=len(group),
            longest=longest,
            tokens=None if all_tokens else torch.tensor([rows.begins[row] for row in group]),
            slots=_Slots.of(slots, maybe_consecutive=len(group) == 1),
            mask=mask,
        )

    def _extend_row(self, rows: _Rows, row: int, window: int | None) -> _ExtendRow:
        queries, length = rows.query_lens[row], rows.kv_lens[row]
        prefix = length - queries
        first = max(0, prefix + 1 - window) if window is not None else 0
        slots = (
            _Slots.of(self._slots(rows, row, torch.arange(first, length)), maybe_consecutive=True) if prefix else None
        )
        if prefix == 0 and (window is None or window >= length):
            blocks = [_Block(0, queries, 0, length, True, None)]
        else:
            bounds = [*range(0, queries, _QUERY_BLOCK), queries]
            blocks = [self._block(prefix, begin, end, first, window) for begin, end in pairwise(bounds)]
        return _ExtendRow(rows.begins[row], rows.begins[row + 1], slots, tuple(blocks))

    def _block(self, prefix: int, begin: int, end: int, first: int, window: int | None) -> _Block:
        """The mask of queries [begin, end), whose positions start at prefix + begin; keys start at `first`."""
        first_visible = first if window is None else max(0, prefix + begin + 1 - window)
        position = torch.arange(prefix + begin, prefix + end).unsqueeze(1)
        key = torch.arange(first_visible, prefix + end)
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        return _Block(begin, end, first_visible - first, prefix + end - first, False, mask)

    # Attention, once per layer

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: StepPlan) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        read_plan = metadata.read_plans.get(layer.window) or self._read_plan(metadata, layer.window)
        keys, values = self._keys[layer.index], self._values[layer.index]
        keys.index_copy_(0, metadata.written, k.to(self._dtype))
        values.index_copy_(0, metadata.written, v.to(self._dtype))
        if not read_plan.extend and len(read_plan.decode) == 1 and read_plan.decode[0].tokens is None:
            return self._decode(layer, q, keys, values, read_plan.decode[0])
        out = q.new_empty(q.shape[0], layer.heads, v.shape[-1])
        for group in read_plan.decode:
            assert group.tokens is not None
            attended = self._decode(layer, q.index_select(0, group.tokens), keys, values, group)
            out.index_copy_(0, group.tokens, attended)
        for row in read_plan.extend:
            self._extend(layer, q, k, v, keys, values, row, out)
        return out

    def _decode(self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, group: _DecodeGroup) -> Tensor:
        """q [rows, heads, dim] -> [rows, heads, value_dim]."""
        shape = (group.rows, group.longest, layer.kv_heads, -1)
        key = self._key_workspace.read(keys, group.slots).view(shape).transpose(1, 2)
        value = self._value_workspace.read(values, group.slots).view(shape).transpose(1, 2)
        query = q.view(group.rows, layer.kv_heads, -1, q.shape[2])
        out = _attend(layer, query, key, value, group.mask, False)
        return out.reshape(group.rows, layer.heads, -1)

    def _extend(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        row: _ExtendRow,
        out: Tensor,
    ) -> None:
        if row.slots is None:
            key, value = k[row.begin : row.end], v[row.begin : row.end]
        else:
            key = self._key_workspace.read(keys, row.slots)
            value = self._value_workspace.read(values, row.slots)
        group = layer.heads // layer.kv_heads
        key = key.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        value = value.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        for block in row.blocks:
            tokens = slice(row.begin + block.begin, row.begin + block.end)
            query = q[tokens].view(block.end - block.begin, layer.kv_heads, group, -1).permute(1, 2, 0, 3)
            visible = slice(block.first, block.last)
            attended = _attend(layer, query, key[:, :, visible], value[:, :, visible], block.mask, block.causal)
            out[tokens] = attended.permute(2, 0, 1, 3).flatten(1, 2)


class _Workspace:
    """A buffer for gathered keys or values. It is reused, because fresh memory costs more than the copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory = torch.empty(0, dtype=dtype)

    def read(self, pool: Tensor, slots: _Slots) -> Tensor:
        """pool[slots], [n, kv_heads, dim], valid until the next call; a view if the slots are consecutive."""
        if slots.start is not None:
            return pool.narrow(0, slots.start, slots.count)
        width = pool.shape[1] * pool.shape[2]
        size = slots.count * width
        if self._memory.shape[0] < size:
            self._memory = torch.empty(size + size // 2, dtype=self._dtype)
        out = self._memory[:size].view(slots.count, pool.shape[1], pool.shape[2])
        return torch.index_select(pool, 0, slots.indices, out=out)


def _attend(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> Tensor:
    """Scaled dot-product attention over the last two axes; key and value are cast to the query's dtype."""
    if key.dtype != query.dtype or value.dtype != query.dtype:
        key, value = key.to(query.dtype), value.to(query.dtype)
        mask = None if mask is None else mask.to(query.dtype)
    if layer.soft_cap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=layer.scale)
    scores = torch.matmul(query, key.transpose(-1, -2)).float().mul_(layer.scale / layer.soft_cap)
    scores.tanh_().mul_(layer.soft_cap)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    elif mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1).to(query.dtype), value)


def _visible(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)


def _groups(rows: _Rows, short: list[int], window: int | None) -> list[list[int]]:
    """Groups of rows with one query, split where saved padding outweighs another call, or a call would be too large.

    A single group keeps the order of the rows, so that q need not be gathered.
    """
    by_length = sorted(short, key=lambda row: -rows.kv_lens[row])
    groups: list[list[int]] = []
    longest = 0
    for done, row in enumerate(by_length):
        length = _visible(rows.kv_lens[row], window)
        saved = (longest - length) * (len(by_length) - done)
        if not groups or saved > _GROUP_COST or (len(groups[-1]) + 1) * longest > _GROUP_TOKENS:
            groups.append([])
            longest = length
        groups[-1].append(row)
    return [sorted(group) for group in groups]
