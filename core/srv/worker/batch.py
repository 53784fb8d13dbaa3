"""Builds the input tensors of a forward pass from the rows of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from srv.models.base import ModelInputs
from srv.platform.transfers import Transfers
from srv.sample.pooling import VectorRow
from srv.sample.verify import DraftRows
from srv.sched.plan import Row
from srv.worker.slots import IntArray, Slots


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of one step. The tokens of all rows are concatenated along the token axis.

    model: the model's inputs, on the device. query_lens, kv_lens: on the host, one value per row.
    outputs: int64 [n] on the device, the token-axis positions whose logits are needed: one for each row that samples,
    then those to score; None: every position, in order. sampled: indices of the plan's rows that sample.
    scores: (index, targets) for each row with positions to score; targets are int64, one token per scored position.
    vectors: the rows whose hidden states are pooled or returned, by index.
    lengths: int32 [rows] on the device, the true KV lengths, if `kv_lens` are only upper bounds.
    drafts: the positions to sample in a step with drafts, or after one. drafts_only: every row computes the last known
    token of its request and what follows it, drafts or forced tokens, nothing else.
    """

    model: ModelInputs
    query_lens: list[int]
    kv_lens: list[int]
    outputs: torch.Tensor | None
    sampled: list[int]
    scores: list[tuple[int, IntArray]]
    vectors: dict[int, VectorRow]
    lengths: torch.Tensor | None = None
    drafts: DraftRows | None = None
    drafts_only: bool = False

    @property
    def decodes_only(self) -> bool:
        """Whether every row computes one token, or one and what follows it, and the step scores and returns nothing
        else.
        """
        one_token_each = self.model.tokens.numel() == len(self.query_lens)
        return (one_token_each or self.drafts_only) and not self.scores and not self.vectors


def build(rows: Sequence[Row], slots: Slots, transfers: Transfers) -> Inputs:
    """The inputs of a step. Every tensor is built on the host as a whole and copied to the device once."""
    if slots.all_decode(rows) and all(row.sample and not row.score and not row.vectors for row in rows):
        return _decode(rows, slots)
    lens = np.fromiter((row.scheduled for row in rows), dtype=np.int64, count=len(rows))
    computed = np.fromiter((row.computed for row in rows), dtype=np.int64, count=len(rows))
    ends = np.cumsum(lens)
    total = int(ends[-1])
    positions = np.arange(total, dtype=np.int64) + np.repeat(computed - (ends - lens), lens)
    sampled = [index for index, row in enumerate(rows) if row.sample]
    scores = [(index, slots.score_targets(row)) for index, row in enumerate(rows) if row.score]
    types = slots.token_types(rows) if slots.types_from else None
    return Inputs(
        model=ModelInputs(
            _tokens(rows, slots, ends, transfers),
            transfers.upload(positions),
            None if types is None else transfers.upload(types),
        ),
        query_lens=lens.tolist(),
        kv_lens=(computed + lens).tolist(),
        outputs=outputs_of(rows, sampled, ends, scores, transfers),
        sampled=sampled,
        scores=scores,
        vectors=vector_rows(rows, ends),
        drafts_only=any(row.forced for row in rows) and all(row.forced or row.scheduled == 1 for row in rows),
    )


def _decode(rows: Sequence[Row], slots: Slots) -> Inputs:
    """The inputs of a decode-only step: each row feeds its last sampled token and samples the next one."""
    computed = [row.computed for row in rows]
    return Inputs(
        model=ModelInputs(slots.last_tokens(tuple([row.slot for row in rows])), slots.positions(computed)),
        query_lens=[1] * len(rows),
        kv_lens=[position + 1 for position in computed],
        outputs=None,
        sampled=list(range(len(rows))),
        scores=[],
        vectors={},
    )


def _tokens(rows: Sequence[Row], slots: Slots, ends: IntArray, transfers: Transfers) -> torch.Tensor:
    """The step's input tokens on the device."""
    known = [slots.known_tokens(row) for row in rows]
    fed_back = [index for index, ids in enumerate(known) if ids is None]
    last = tuple([rows[index].slot for index in fed_back])
    if len(fed_back) == len(rows):
        return slots.last_tokens(last)
    host = np.zeros(int(ends[-1]), dtype=np.int64)
    for ids, row, end in zip(known, rows, ends, strict=True):
        if ids is not None:
            host[end - row.scheduled : end] = ids
    tokens = transfers.upload(host)
    if fed_back:
        tokens[transfers.upload(ends[fed_back] - 1)] = slots.last_tokens(last)
    return tokens


def vector_rows(rows: Sequence[Row], ends: IntArray) -> dict[int, VectorRow]:
    """The rows whose hidden states are needed, by index; `ends`: where each row ends in the token axis."""
    return {
        index: VectorRow(row.slot, int(ends[index]) - row.vectors, int(ends[index]), row.computed + row.scheduled)
        for index, row in enumerate(rows)
        if row.vectors
    }


def outputs_of(
    rows: Sequence[Row], sampled: list[int], ends: IntArray, scores: list[tuple[int, IntArray]], transfers: Transfers
) -> torch.Tensor | None:
    """Token-axis positions whose logits are needed; None: every position, in order."""
    needed = [ends[index] - np.arange(rows[index].sample, 0, -1) for index in sampled]
    for index, targets in scores:
        begin = ends[index] - rows[index].score
        needed.append(np.arange(begin, begin + len(targets)))
    flat = np.concatenate(needed) if needed else np.zeros(0, dtype=np.int64)
    if not scores and len(flat) == int(ends[-1]):
        return None
    return transfers.upload(flat)
