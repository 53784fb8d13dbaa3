"""What attention with torch operators reads and writes in a step: the pool slots of every row, planned once per step.

Owns everything that depends only on lengths and pages. Must not know what is stored per token, nor layers beyond which
keys they see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from srv.platform.interface import AttentionBatch
from srv_cpu.reach import Reach

_GROUP_COST = 256  # padded tokens that cost as much as another call
_GROUP_TOKENS = 8192  # gathered tokens per call: bounds the workspace, so that it fits the caches
_QUERY_BLOCK = 256  # queries per masked call: bounds the mask and the masked scores


@dataclass(frozen=True, slots=True)
class PoolSlots:
    """Pool slots to read: `indices`, int64 [n]; `start` is set if they are consecutive."""

    count: int
    start: int | None
    indices: Tensor

    @classmethod
    def of(cls, indices: Tensor, maybe_consecutive: bool) -> PoolSlots:
        consecutive = maybe_consecutive and bool((indices.diff() == 1).all())
        return cls(indices.shape[0], int(indices[0]) if consecutive else None, indices)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one query each. `tokens`: their indices in the token axis; None: all tokens, in order.

    `slots`: [rows x longest] pool slots to read; `mask`: 0 or -inf, [rows, 1, 1, longest], None if all rows have the
    same length. `positions`, of the keys, int64 [rows, longest]; `ends`, the lengths of the rows, int64 [rows, 1].
    """

    rows: int
    longest: int
    tokens: Tensor | None
    slots: PoolSlots
    mask: Tensor | None
    positions: Tensor
    ends: Tensor

    def distances(self) -> Tensor:
        """Positions of keys minus that of the row's query, float32 [rows, 1, 1, longest]."""
        return (self.positions - (self.ends - 1)).float()[:, None, None]

    def query_positions(self) -> Tensor:
        """Of the row's query, float32 [rows, 1, 1, 1]."""
        return (self.ends - 1).float()[:, None, None]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [begin, end) of a row with its gathered keys [first, last). `mask`: [queries, keys] or None.

    `ahead`: the position of the first query, `position`, minus that of the first key.
    """

    begin: int
    end: int
    first: int
    last: int
    causal: bool
    mask: Tensor | None
    ahead: int
    position: int

    def distances(self) -> Tensor:
        """Positions of keys minus those of queries, float32 [queries, keys]."""
        queries = torch.arange(self.ahead, self.ahead + self.end - self.begin)
        return (torch.arange(self.last - self.first) - queries[:, None]).float()

    def query_positions(self) -> Tensor:
        """Float32 [queries, 1]."""
        return torch.arange(self.position, self.position + self.end - self.begin).float()[:, None]


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """A row with several queries: tokens [begin, end) of the step.

    `slots`: what to read; None: the row has no keys besides those of this step.
    """

    begin: int
    end: int
    slots: PoolSlots | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What layers of one reach read in this step."""

    decode: tuple[DecodeGroup, ...]
    extend: tuple[ExtendRow, ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The batch, and the offsets of its rows in the token axis (cumulative query lengths)."""

    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    begins: Sequence[int]
    page_table: Tensor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's metadata: the slot that each token is written to and, per reach, the slots to read."""

    tokens: int
    written: Tensor  # int64 [tokens]
    rows: _Rows
    read_plans: dict[Reach, ReadPlan] = field(default_factory=dict)


class StepPlanner:
    """Plans the steps of one cache group. `dtype`: that of the masks."""

    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        self._page_size, self._dtype = page_size, dtype

    def plan(self, batch: AttentionBatch, *, writes: bool = True) -> StepPlan:
        """See `srv.platform.interface.AttentionBackend`. `writes`: whether layers write into the pool."""
        begins = [0]
        for length in batch.query_lens:
            begins.append(begins[-1] + length)
        kv_lens = batch.kv_lens if batch.lengths is None else batch.lengths.tolist()  # the host is the device
        rows = _Rows(batch.query_lens, kv_lens, begins, batch.page_table.long())
        written = self._written(rows) if writes else torch.empty(0, dtype=torch.int64)
        return StepPlan(begins[-1], written, rows)

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

    def read_plan(self, plan: StepPlan, reach: Reach) -> ReadPlan:
        """What layers with this reach read; computed by the first such layer of a step."""
        read_plan = plan.read_plans.get(reach)
        if read_plan is None:
            rows = plan.rows
            short = [row for row, length in enumerate(rows.query_lens) if length == 1]
            read_plan = plan.read_plans[reach] = ReadPlan(
                tuple(self._decode_group(rows, group, reach) for group in _groups(rows, short, reach)),
                tuple(self._extend_row(rows, row, reach) for row, length in enumerate(rows.query_lens) if length > 1),
            )
        return read_plan

    def _decode_group(self, rows: _Rows, group: list[int], reach: Reach) -> DecodeGroup:
        lengths = torch.tensor([reach.visible(rows.kv_lens[row]) for row in group]).unsqueeze(1)
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
        return DecodeGroup(
            rows=len(group),
            longest=longest,
            tokens=None if all_tokens else torch.tensor([rows.begins[row] for row in group]),
            slots=PoolSlots.of(slots, maybe_consecutive=len(group) == 1),
            mask=mask,
            positions=positions,
            ends=ends,
        )

    def _extend_row(self, rows: _Rows, row: int, reach: Reach) -> ExtendRow:
        queries, length = rows.query_lens[row], rows.kv_lens[row]
        prefix = length - queries
        first = reach.first(prefix)
        slots = (
            PoolSlots.of(self._slots(rows, row, torch.arange(first, length)), maybe_consecutive=True)
            if prefix
            else None
        )
        if prefix == 0 and reach.first(length - 1) == 0:
            blocks = [Block(0, queries, 0, length, True, None, 0, 0)]
        else:
            bounds = [*range(0, queries, _QUERY_BLOCK), queries]
            blocks = [self._block(prefix, begin, end, first, reach) for begin, end in pairwise(bounds)]
        return ExtendRow(rows.begins[row], rows.begins[row + 1], slots, tuple(blocks))

    def _block(self, prefix: int, begin: int, end: int, first: int, reach: Reach) -> Block:
        """The mask of queries [begin, end), whose positions start at prefix + begin; keys start at `first`."""
        first_visible = reach.first(prefix + begin)
        position = torch.arange(prefix + begin, prefix + end).unsqueeze(1)
        key = torch.arange(first_visible, prefix + end)
        hidden = (key > position) | reach.hides(key, position)
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        visible = first_visible - first, prefix + end - first
        return Block(begin, end, *visible, False, mask, prefix + begin - first_visible, prefix + begin)


def _groups(rows: _Rows, short: list[int], reach: Reach) -> list[list[int]]:
    """Groups of rows with one query, split where saved padding outweighs another call, or a call would be too large.

    A single group keeps the order of the rows, so that q need not be gathered.
    """
    by_length = sorted(short, key=lambda row: -rows.kv_lens[row])
    groups: list[list[int]] = []
    longest = 0
    for shorter, row in enumerate(by_length):
        length = reach.visible(rows.kv_lens[row])
        saved = (longest - length) * (len(by_length) - shorter)
        if not groups or saved > _GROUP_COST or (len(groups[-1]) + 1) * longest > _GROUP_TOKENS:
            groups.append([])
            longest = length
        groups[-1].append(row)
    return [sorted(group) for group in groups]
