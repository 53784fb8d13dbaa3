"""How the rows of a step are divided into calls of the fused attention operator. It must not know the operator's other
operands.

    full attention, decode only       one call; a captured step always is one
    full attention, TND heads         one call for rows of any length
    full attention, other heads       decode rows in one call, each longer row in a call of its own
    sliding window                    as for other heads, since not every release takes windows in TND

A window's calls read no page before it, whose contents may be anything: page tables begin with the page of the first
key that a query of the row sees, and lengths count from there.

    tokens of a row     0        128       256       384        pages of 128 tokens
                        |         |    xxxx|xxxxxxxxx|xx q      window of query q: x
    table, lengths                |<-- from here
    mask of one query             |hhhh                         keys of the first page that are hidden

The operator ignores sparse modes for rows with one query, so that these get a mask over the pages of their window.
Longer rows have sparse mode 4 (band).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srv.platform.transfers import Transfers
from srv_npu.graphs import HostLengths
from srv_npu.limits import PAGE

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows with one query token each.

    tokens: int64, the indices of these tokens in the step; None if the step has only such rows, in order.
    ends: cumulative query lengths; None for BSH, which takes none. table: int32 [rows, columns]. mask: bool
    [rows, 1, columns * PAGE], true for keys before the window; None without one.
    workspaces: the operator's scratch memory by (heads, kv_heads, head_dim), allocated once and shared by every layer
    with those sizes.
    """

    tokens: Tensor | None
    ends: list[int] | None
    kv_lens: HostLengths
    table: Tensor
    mask: Tensor | None = None
    workspaces: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of any length in one call. ends: cumulative query lengths. kv_lens: per row, not cumulative."""

    ends: list[int]
    kv_lens: list[int]
    table: Tensor


@dataclass(frozen=True, slots=True)
class SingleRow:
    """One row with several query tokens, the tokens [begin, end) of the step. table: int32 [1, columns]."""

    begin: int
    end: int
    kv_len: int
    table: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The calls of one layer. window: None if it hides no key of this step."""

    window: int | None
    decode: Decode | None = None
    packed: Packed | None = None
    single_rows: tuple[SingleRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step. queries: int64 [rows]. table: int32 [rows, columns]. longest: the tokens of its longest
    row; of a captured step, of the longest that its table holds.

    rows: the calls of layers by their window, planned for the first layer that has it. A captured step is the same
    object whenever it is planned, so that its calls have their tensors and lengths at the same place.
    """

    queries: Ints
    kv_lens: HostLengths
    table: Tensor
    longest: int
    captured: bool
    rows: dict[int | None, Rows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _WindowView:
    """What rows with one query see of their pages; shapes as in `Decode`."""

    kv_lens: list[int]
    table: Tensor
    mask: Tensor


class RowPlanner:
    """Plans the calls of a backend. can_pack: whether TND takes its heads; needs_ends: no other layout does."""

    def __init__(self, transfers: Transfers, *, can_pack: bool, needs_ends: bool) -> None:
        self._transfers = transfers
        self._can_pack = can_pack
        self._needs_ends = needs_ends

    def rows(self, step: Step, window: int | None) -> Rows:
        """The calls of layers with this window."""
        key = window if window is not None and window < step.longest else None
        if key not in step.rows:
            step.rows[key] = self._full(step) if key is None else self._windowed(step, key)
        return step.rows[key]

    def refresh(self, step: Step) -> None:
        """Bring the calls of a captured step to its present lengths and page table."""
        for window, rows in step.rows.items():
            decode = rows.decode
            if window is None or decode is None or decode.mask is None:
                continue  # these have the lengths and the table of the step
            view = self._view(step.kv_lens.values, step.table, window)
            decode.kv_lens.values = view.kv_lens
            decode.table.copy_(view.table)
            decode.mask.copy_(view.mask)

    def _full(self, step: Step) -> Rows:
        if step.captured or int(step.queries.max()) == 1:
            ends = list(range(1, len(step.queries) + 1)) if self._needs_ends else None
            return Rows(None, Decode(None, ends, step.kv_lens, step.table))
        if self._can_pack:
            return Rows(None, packed=Packed(np.cumsum(step.queries).tolist(), step.kv_lens.values, step.table))
        tokens, kv_lens, table = self._decode_rows(step)
        decode = None if tokens is None else Decode(tokens, None, HostLengths(kv_lens), table)
        return Rows(None, decode, None, _single_rows(step, None))

    def _windowed(self, step: Step, window: int) -> Rows:
        if step.captured or int(step.queries.max()) == 1:
            return Rows(window, self._windowed_decode(None, step.kv_lens.values, step.table, window))
        tokens, kv_lens, table = self._decode_rows(step)
        decode = None if tokens is None else self._windowed_decode(tokens, kv_lens, table, window)
        return Rows(window, decode, None, _single_rows(step, window))

    def _windowed_decode(self, tokens: Tensor | None, kv_lens: list[int], table: Tensor, window: int) -> Decode:
        view = self._view(kv_lens, table, window)
        return Decode(tokens, None, HostLengths(view.kv_lens), view.table, view.mask)

    def _decode_rows(self, step: Step) -> tuple[Tensor | None, list[int], Tensor]:
        """The rows with one query token, in a step that also has longer ones: tokens, lengths and page tables."""
        rows = np.flatnonzero(step.queries == 1)
        if len(rows) == 0:
            return None, [], step.table
        tokens, index = (self._transfers.upload(array) for array in (np.cumsum(step.queries)[rows] - 1, rows))
        return tokens, [step.kv_lens.values[row] for row in rows], step.table.index_select(0, index)

    def _view(self, kv_lens: list[int], table: Tensor, window: int) -> _WindowView:
        """Tables of as many pages as a window can touch, however it lies."""
        lengths = np.asarray(kv_lens, dtype=np.int64)
        first_keys = np.maximum(lengths - window, 0)
        first_pages = first_keys // PAGE
        columns = min(-(-(window - 1) // PAGE) + 1, table.shape[1])
        pages, hidden = self._transfers.upload(np.stack((first_pages, first_keys % PAGE)))
        places = torch.arange(columns * PAGE, device=table.device)
        index = (pages[:, None] + places[:columns]).clamp_max(table.shape[1] - 1)
        return _WindowView(
            (lengths - first_pages * PAGE).tolist(), table.gather(1, index), places < hidden[:, None, None]
        )


def _single_rows(step: Step, window: int | None) -> tuple[SingleRow, ...]:
    """The rows with several query tokens, which need a call each."""
    ends = np.cumsum(step.queries).tolist()
    single = []
    for row, (end, queries) in enumerate(zip(ends, step.queries.tolist(), strict=True)):
        if queries == 1:
            continue
        kv_len = step.kv_lens.values[row]
        first = 0 if window is None else max(0, kv_len - queries + 1 - window) // PAGE
        single.append(SingleRow(end - queries, end, kv_len - first * PAGE, step.table[row : row + 1, first:]))
    return tuple(single)
