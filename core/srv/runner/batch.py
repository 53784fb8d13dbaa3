"""From the rows of a plan to the input tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from srv.runner.slots import Ints, Slots
from srv.sched.plan import Row


@dataclass(frozen=True, slots=True)
class Inputs:
    """Input of one step; rows lie one after the other in the token axis.

    tokens, positions: int64 [scheduled tokens] on the device. query_lens, kv_lens: host, one a row.
    outputs: int64 [n] on the device, the token-axis positions whose logits are wanted: first one for each
    row that samples, then the scored ones; None means every position, in order. `sampled`: indices into the
    plan's rows of those that sample. `scores`: for each row that is scored, its index and the target tokens,
    int64, one for each of its scored positions. `sources`: host memory that is on its way to the device; to be kept
    until the step is done, since a device may read it only when it gets there.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    query_lens: list[int]
    kv_lens: list[int]
    outputs: torch.Tensor | None
    sampled: list[int]
    scores: list[tuple[int, Ints]]
    sources: tuple[torch.Tensor, ...] = ()


def build(rows: Sequence[Row], slots: Slots, device: torch.device) -> Inputs:
    """Lay the rows out. Every tensor is built on the host in one piece and copied once."""
    if slots.feeds_last(rows) and all(row.sample and not row.score for row in rows):
        return _decode(rows, slots)
    lens = np.fromiter((row.scheduled for row in rows), dtype=np.int64, count=len(rows))
    computed = np.fromiter((row.computed for row in rows), dtype=np.int64, count=len(rows))
    ends = np.cumsum(lens)
    total = int(ends[-1])
    positions = np.arange(total, dtype=np.int64) + np.repeat(computed - (ends - lens), lens)
    sampled = [index for index, row in enumerate(rows) if row.sample]
    scores = [(index, slots.targets(row)) for index, row in enumerate(rows) if row.score]
    tokens, ids = _tokens(rows, slots, ends, device)
    places = torch.from_numpy(positions)
    return Inputs(
        tokens=tokens,
        positions=places.to(device, non_blocking=True),
        query_lens=lens.tolist(),
        kv_lens=(computed + lens).tolist(),
        outputs=_outputs(rows, sampled, ends, scores, device),
        sampled=sampled,
        scores=scores,
        sources=(places, *ids),
    )


def _decode(rows: Sequence[Row], slots: Slots) -> Inputs:
    """Every row feeds what it sampled last, and samples again."""
    computed = [row.computed for row in rows]
    positions, sources = slots.positions(computed)
    return Inputs(
        tokens=slots.last(tuple([row.slot for row in rows])),
        positions=positions,
        query_lens=[1] * len(rows),
        kv_lens=[position + 1 for position in computed],
        outputs=None,
        sampled=list(range(len(rows))),
        scores=[],
        sources=sources,
    )


def _tokens(
    rows: Sequence[Row], slots: Slots, ends: Ints, device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The step's tokens, and the host memory that they are copied from."""
    known = [slots.known(row) for row in rows]
    fed_back = [index for index, ids in enumerate(known) if ids is None]
    last = tuple([rows[index].slot for index in fed_back])
    if len(fed_back) == len(rows):
        return slots.last(last), ()
    host = np.zeros(int(ends[-1]), dtype=np.int64)
    for ids, row, end in zip(known, rows, ends, strict=True):
        if ids is not None:
            host[end - row.scheduled : end] = ids
    source = torch.from_numpy(host)
    tokens = source.to(device, non_blocking=True)
    if fed_back:
        at = torch.from_numpy(ends[fed_back] - 1).to(device)
        tokens[at] = slots.last(last)
    return tokens, (source,)


def _outputs(
    rows: Sequence[Row], sampled: list[int], ends: Ints, scores: list[tuple[int, Ints]], device: torch.device
) -> torch.Tensor | None:
    """Token-axis positions whose logits are wanted; None: those of every token, in order."""
    wanted = [ends[sampled] - 1]
    for index, targets in scores:
        begin = ends[index] - rows[index].score
        wanted.append(np.arange(begin, begin + len(targets)))
    flat = np.concatenate(wanted)
    if len(sampled) == len(rows) == int(ends[-1]) == len(flat):
        return None
    return torch.from_numpy(flat).to(device)
