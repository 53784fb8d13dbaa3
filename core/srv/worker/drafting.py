"""Steps with drafts: builds their inputs on the device, and keeps each slot's history up to date.

    histories ──► drafter.propose ──► drafts ─┐
        │                                     ├──► tokens, positions, KV lengths of the step
        └──► lengths ──► where rows begin ────┘
        ▲
        └──────────────────── accepted tokens ◄──── sampler

Where a row begins may be known to the device only (`Row.drafts_in_flight`), so nothing here waits for it. Indices that
depend only on the shape of a step are kept from one step to the next. Must not know how drafts are found or verified.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from srv.models.base import ModelInputs
from srv.platform.transfers import Transfers
from srv.sample.processors import SampleRow
from srv.sample.sampler import SampledBatch
from srv.sample.verify import DraftRows, DraftShape
from srv.sched.plan import Row, Start
from srv.speculative.drafter import Drafter
from srv.worker.batch import Inputs, outputs_of, vector_rows
from srv.worker.histories import Histories
from srv.worker.slots import IntArray, Slots


class _Shape:
    """What depends on the slots, lengths and kinds of the rows of a step, but not on their positions.

    `decode`: indices of the rows that begin with the slot's last token.
    """

    def __init__(self, rows: Sequence[Row], decode: Sequence[int], transfers: Transfers) -> None:
        def indices(values: Sequence[int] | IntArray) -> torch.Tensor:
            return transfers.upload(torch.tensor(values, dtype=torch.int64))

        lens = np.array([row.scheduled for row in rows])
        self.ends = np.cumsum(lens)
        begins = self.ends - lens
        drafted = [index for index in decode if rows[index].drafts]
        places = [(index, draft) for index in drafted for draft in range(rows[index].drafts)]
        self.total = int(self.ends[-1])
        self.most_drafts = max((rows[index].drafts for index in drafted), default=0)
        self.sampled = [index for index, row in enumerate(rows) if row.sample]
        self.lens = indices(lens)
        self.owner = indices(np.repeat(np.arange(len(rows)), lens))
        self.offset = indices(np.arange(self.total) - np.repeat(begins, lens))
        self.decode = indices(decode)
        self.decode_slots = indices([rows[index].slot for index in decode])
        self.decode_begins = indices(begins[list(decode)])
        self.drafted_slots = indices([rows[index].slot for index in drafted])
        self.draft_places = indices([begins[index] + 1 + draft for index, draft in places])
        self.draft_columns = indices([drafted.index(index) * self.most_drafts + draft for index, draft in places])
        self.sampled_slots = indices([rows[index].slot for index in self.sampled])
        self.sampled_places = indices(
            [self.ends[index] - rows[index].sample + at for index in self.sampled for at in range(rows[index].sample)]
        )
        self.drafts = DraftShape([rows[index].sample for index in self.sampled], transfers) if self.sampled else None


class Drafting:
    """The drafter of one rank, and the histories that it reads."""

    def __init__(self, drafter: Drafter, histories: Histories, transfers: Transfers) -> None:
        self._drafter = drafter
        self._histories = histories
        self._transfers = transfers
        self._latest: tuple[object, _Shape] | None = None
        self._one_each: tuple[tuple[int, ...], torch.Tensor] | None = None

    def start(self, start: Start) -> None:
        self._histories.start(start)

    @staticmethod
    def concerns(rows: Sequence[Row]) -> bool:
        """Whether a step has drafts, rows that begin where drafts in flight end, or tokens that histories lack."""
        return any(row.drafts or row.drafts_in_flight or row.forced for row in rows)

    def build(self, rows: Sequence[Row], slots: Slots) -> Inputs:
        """The inputs of such a step, as `srv.worker.batch.build` makes those of other steps."""
        for row in rows:
            if row.forced:
                self._histories.extend(row.slot, row.computed, row.forced)
        shape = self._shape(rows, slots)
        known = self._histories.lengths
        begins = self._transfers.upload_integers([row.computed for row in rows])
        begins[shape.decode] = known[shape.decode_slots] - 1
        tokens = self._tokens(rows, slots, shape)
        scores = [(index, slots.score_targets(row)) for index, row in enumerate(rows) if row.score]
        outputs = outputs_of(rows, shape.sampled, shape.ends, scores, self._transfers)
        fed = tokens if outputs is None else tokens[shape.sampled_places]
        return Inputs(
            model=ModelInputs(tokens, begins[shape.owner] + shape.offset),
            query_lens=[row.scheduled for row in rows],
            kv_lens=[row.computed + row.scheduled for row in rows],
            outputs=outputs,
            sampled=shape.sampled,
            scores=scores,
            vectors=vector_rows(rows, shape.ends),
            lengths=(begins + shape.lens).int() if any(row.drafts_in_flight for row in rows) else None,
            drafts=DraftRows(shape.drafts, fed, known[shape.sampled_slots]) if shape.drafts else None,
            drafts_only=all(row.forced or (row.scheduled == 1 + row.drafts and row.sample) for row in rows),
        )

    def _shape(self, rows: Sequence[Row], slots: Slots) -> _Shape:
        decode = tuple([index for index, row in enumerate(rows) if not slots.knows(row)])
        key = decode, tuple([(row.slot, row.scheduled, row.sample, row.drafts) for row in rows])
        if self._latest is None or self._latest[0] != key:
            self._latest = key, _Shape(rows, decode, self._transfers)
        return self._latest[1]

    def _tokens(self, rows: Sequence[Row], slots: Slots, shape: _Shape) -> torch.Tensor:
        """The tokens of all rows on the device."""
        host = np.zeros(shape.total, dtype=np.int64)
        for row, end in zip(rows, shape.ends, strict=True):
            ids = slots.known_tokens(row) if slots.knows(row) else None
            if ids is not None:
                host[end - row.scheduled : end] = ids
        tokens = self._transfers.upload(host)
        history, lengths = self._histories.tokens, self._histories.lengths
        last = lengths[shape.decode_slots] - 1
        tokens[shape.decode_begins] = history[shape.decode_slots, last].long()
        if shape.most_drafts:
            longest = max(row.computed + row.scheduled for row in rows)
            drafts = self._drafter.propose(
                history[shape.drafted_slots, :longest], lengths[shape.drafted_slots], shape.most_drafts
            )
            tokens[shape.draft_places] = drafts.flatten()[shape.draft_columns]
        return tokens

    def append(self, slots: tuple[int, ...], sampled: SampledBatch, drafts: DraftRows | None) -> torch.Tensor:
        """Append what these slots have sampled to their histories; returns the last token of each, int64 [slots]."""
        if self._one_each is None or self._one_each[0] != slots:
            self._one_each = slots, self._transfers.upload_integers(slots)
        index = self._one_each[1]
        if drafts is None or sampled.accepted is None:
            self._histories.append(index, sampled.tokens)
            return sampled.tokens
        self._histories.append_accepted(index, drafts.shape, sampled.tokens, sampled.accepted)
        return sampled.tokens[drafts.shape.last(sampled.accepted)]


def sample_rows(rows: Sequence[Row]) -> list[SampleRow]:
    """The positions to sample of these rows, one after the other."""
    return [
        SampleRow(row.slot, row.computed + row.scheduled - row.drafts + draft, draft, row.drafts_in_flight)
        for row in rows
        for draft in range(row.sample)
    ]
