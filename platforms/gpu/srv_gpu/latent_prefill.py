"""Which rows of a step with latent attention are materialised, and in which parts their keys are read.

All of them attend to their own tokens first, then to what they have in the cache, in parts of bounded size:

    cached keys    row 0: 0 ........ 5000 | row 2: 0 ... 3000
    parts          0 ........ 4096 | 4096 .. 5000, 0 ... 3000      the keys of a part are up-projected in one product
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srv.platform.transfers import Transfers
from srv.specs import LatentDims
from srv_gpu.step import Step, StepPlanner

Ints = npt.NDArray[np.int64]
PART = 4096  # cached keys whose heads' keys and values exist at the same time


@dataclass(frozen=True, slots=True)
class Part:
    """Keys that the rows attend to in one call. slots: int64, where the pool has them; None: the rows' own tokens.

    segments, tiles: see `srv_kernels.triton.latent_prefill`.
    """

    slots: Tensor | None
    segments: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class LongRows:
    """The materialised rows. tokens: int64, the indices of their tokens in the step; None if it has no others."""

    tokens: Tensor | None
    parts: tuple[Part, ...]


class _Piece(NamedTuple):
    """Cached keys of a row in a part: `keys` of them from position `first` on. number: of the row in `LongRows`."""

    number: int
    first: int
    keys: int


def fewest_materialised(dims: LatentDims) -> int | None:
    """From how many query tokens on a row takes fewer products if it is materialised; None: it never does.

    Per head and key, q queries take q * (2 latent + rope) products absorbed, and q * (key + rope + value) +
    latent * (key + value) materialised: DeepSeek-V3's 1,088 q and 320 q + 131,072, which are equal for 170.7 queries.
    What a query's absorption costs, as much as the keys and values of one key do, is left out: with it, rows with
    nothing in the cache would take fewer products for any number of queries, but hardly so for few.
    """
    head_dims = dims.key_dim + dims.value_dim
    saved = 2 * dims.latent_dim - head_dims
    return -(-dims.latent_dim * head_dims // saved) if saved > 0 else None


class PrefillPlanner:
    """Plans materialised rows. `tile`: query tokens per tile. `part`: keys; None: a row's whole prefix is one part."""

    def __init__(self, planner: StepPlanner, transfers: Transfers, tile: int, part: int | None) -> None:
        self._planner, self._transfers = planner, transfers
        self._tile, self._part = tile, part

    def plan(self, step: Step, kv_lens: Sequence[int], rows: Ints) -> LongRows:
        """The plan of some rows of a step; `kv_lens`: those of all."""
        queries = np.asarray(step.query_lens, dtype=np.int64)[rows]
        cached = np.asarray(kv_lens, dtype=np.int64)[rows] - queries
        groups = list(_parts(cached.tolist(), self._part))
        pieces = [piece for group in groups for piece in group]
        number, first, keys = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
        begins = [_starts([piece.keys for piece in group]) for group in groups]
        segments = self._segments(queries, number, np.concatenate([*begins, number[:0]]), keys)
        slots: list[Tensor | None] = [None]
        if pieces:
            self._limit(segments[len(rows) :], step.lengths, rows[number], queries[number] + first)
            slots_of_part = self._slots(step.page_table, rows[number], first, keys)
            slots += slots_of_part.split_with_sizes([sum(piece.keys for piece in group) for group in groups])
        counts = [len(rows), *(len(group) for group in groups)]
        of_parts = np.split(np.concatenate((queries, queries[number])), np.cumsum(counts)[:-1])
        tables = [_tiles(of_part, self._tile) for of_part in of_parts]
        tiles = self._transfers.upload(np.concatenate(tables).astype(np.int32))
        per_part = zip(
            slots,
            segments.split_with_sizes(counts),
            tiles.split_with_sizes([len(table) for table in tables]),
            strict=True,
        )
        others = len(rows) < len(step.query_lens)
        tokens = self._transfers.upload(tokens_of(step.query_lens, rows)) if others else None
        return LongRows(tokens, tuple(Part(*part) for part in per_part))

    def _segments(self, queries: Ints, number: Ints, begin: Ints, keys: Ints) -> Tensor:
        """Those of the rows' own tokens, then those of the pieces."""
        starts = _starts(queries)
        ends = starts + queries
        own_segments = np.stack((starts, ends, starts, ends), 1)
        cached = np.stack((starts[number], ends[number], begin, begin + keys), 1)
        return self._transfers.upload(np.concatenate((own_segments, cached)).astype(np.int32))

    def _limit(self, segments: Tensor, lengths: Tensor, rows: Ints, behind: Ints) -> None:
        """Take out keys that a row does not have: KV lengths on the host may be more than those on the device.

        behind: a row's query tokens, and the cached keys before those of the segment.
        """
        moved = self._transfers.upload(np.stack((rows, behind)))
        remaining = (lengths.index_select(0, moved[0]) - moved[1]).clamp_(min=0)
        segments[:, 3] = torch.minimum(segments[:, 3], (segments[:, 2] + remaining).int())

    def _slots(self, page_table: Tensor, rows: Ints, first: Ints, keys: Ints) -> Tensor:
        within = np.arange(int(keys.sum())) - np.repeat(_starts(keys), keys)
        moved = self._transfers.upload(np.stack((np.repeat(rows, keys), np.repeat(first, keys) + within)))
        return self._planner.slots(page_table, moved[0], moved[1])


def tokens_of(query_lens: Sequence[int], rows: Ints) -> Ints:
    """The indices of the tokens of some rows in the step."""
    queries = np.asarray(query_lens, dtype=np.int64)
    chosen = np.zeros(len(queries), dtype=bool)
    chosen[rows] = True
    return np.flatnonzero(np.repeat(chosen, queries))


def _parts(cached: Sequence[int], most: int | None) -> Iterator[list[_Piece]]:
    """The cached keys of rows in parts of at most `most`; None: each row is one part."""
    part: list[_Piece] = []
    room = most or 0
    for number, before in enumerate(cached):
        first = 0
        while first < before:
            keys = before if most is None else min(room, before - first)
            part.append(_Piece(number, first, keys))
            first, room = first + keys, room - keys
            if room <= 0:
                yield part
                part, room = [], most or 0
    if part:
        yield part


def _tiles(queries: Ints, size: int) -> Ints:
    """[tiles, 2]: the segment and the first token of each. Those that see most keys of their own row come first."""
    counts = -(-queries // size)
    segment = np.repeat(np.arange(len(queries)), counts)
    first = (np.arange(len(segment)) - np.repeat(_starts(counts), counts)) * size
    order = np.argsort(-first, kind="stable")
    return np.stack((segment[order], first[order]), 1)


def _starts(counts: Sequence[int] | Ints) -> Ints:
    return np.cumsum(counts, dtype=np.int64) - np.asarray(counts, dtype=np.int64)
