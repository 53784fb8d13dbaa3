"""The choice of keys by the indexer of sparse attention (`srv.specs.IndexDims`), with torch operators.

Owns scores and choice; which slots of the pool hold the index keys is planned as for other attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from srv.specs import IndexDims
from srv_cpu.step_plan import ExtendRow, PoolSlots, ReadPlan

_QUERIES = 256  # queries whose scores exist at the same time


class IndexOperands(NamedTuple):
    """Those of all tokens of a step: keys [T, dim], queries [T, heads, dim], weights [T, heads]."""

    keys: Tensor
    queries: Tensor
    weights: Tensor

    @classmethod
    def of(cls, joined: Tensor, dims: IndexDims) -> IndexOperands:
        """From [T, sum of `IndexDims.operands`]."""
        keys, queries, weights = joined.split(list(dims.operands), 1)
        return cls(keys, queries.view(-1, dims.heads, dims.dim), weights)


class ChosenSlots(NamedTuple):
    """The keys of rows with one query: pool slots [rows, top_k]; `mask`: 0 or -inf, [rows, 1, 1, top_k], or None."""

    slots: Tensor
    mask: Tensor | None


class Choice(NamedTuple):
    """What an indexer chose in a step, for each part of its read plan; None where queries see `top_k` keys at most.

    `extend`: whether each query of a row attends to each of its keys, bool [queries, keys].
    """

    decode: tuple[ChosenSlots | None, ...]
    extend: tuple[Tensor | None, ...]


def choose(plan: ReadPlan, operands: IndexOperands, pool: Tensor, dims: IndexDims) -> Choice:
    """`pool`: the index keys in the pool [slots, dim], those of this step included."""
    decode: list[ChosenSlots | None] = []
    for group in plan.decode:
        if group.longest <= dims.top_k:
            decode.append(None)
            continue
        slots = group.slots.indices.view(group.rows, group.longest)
        tokens = slice(None) if group.tokens is None else group.tokens
        scores = _scores(operands.queries[tokens], operands.weights[tokens], pool[slots], dims)
        if group.mask is not None:
            scores = scores + group.mask[:, 0, 0]
        decode.append(_chosen_slots(largest(scores, dims.top_k), slots, dims.top_k, pool.dtype))
    return Choice(tuple(decode), tuple(_chosen_of_row(row, operands, pool, dims) for row in plan.extend))


def largest(scores: Tensor, count: int) -> Tensor:
    """bool [..., K]: which scores are among the `count` largest; of equal ones the first. -inf never is."""
    least = scores.topk(min(count, scores.shape[-1]), -1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & (scores > float("-inf"))


def _scores(queries: Tensor, weights: Tensor, keys: Tensor, dims: IndexDims) -> Tensor:
    """queries [R, heads, dim], weights [R, heads], keys [R, K, dim] -> float32 [R, K]."""
    products = (queries.float() @ keys.float().transpose(1, 2)).mul_(dims.dim**-0.5).relu_()
    return ((weights.float() * dims.heads**-0.5).unsqueeze(1) @ products).squeeze(1)


def _chosen_slots(chosen: Tensor, slots: Tensor, top_k: int, dtype: torch.dtype) -> ChosenSlots:
    counts = chosen.sum(1, keepdim=True)
    present = torch.arange(top_k) < counts
    index = torch.zeros(len(slots), top_k, dtype=torch.int64)  # otherwise the first key: 0 x NaN would be NaN
    index[present] = chosen.nonzero()[:, 1]
    if bool(present.all()):
        return ChosenSlots(slots.gather(1, index), None)
    mask = torch.zeros(present.shape, dtype=dtype).masked_fill_(~present, float("-inf"))
    return ChosenSlots(slots.gather(1, index), mask[:, None, None])


def _chosen_of_row(row: ExtendRow, operands: IndexOperands, pool: Tensor, dims: IndexDims) -> Tensor | None:
    tokens = slice(row.begin, row.end)
    keys = operands.keys[tokens] if row.slots is None else pool[_indices(row.slots)]
    count, queries = len(keys), row.end - row.begin
    if count <= dims.top_k:
        return None
    chosen = torch.empty(queries, count, dtype=torch.bool)
    transposed, weights = keys.float().t(), operands.weights[tokens].float() * dims.heads**-0.5
    for begin in range(0, queries, _QUERIES):
        block = slice(begin, min(begin + _QUERIES, queries))
        query = operands.queries[tokens][block].float()
        scores = torch.zeros(len(query), count)
        for head in range(dims.heads):  # all at once would need a score per head
            products = (query[:, head] @ transposed).mul_(dims.dim**-0.5).relu_()
            scores.addcmul_(products, weights[block, head, None])
        position = count - queries + torch.arange(block.start, block.stop)
        scores.masked_fill_(torch.arange(count) > position[:, None], float("-inf"))
        chosen[block] = largest(scores, dims.top_k)
    return chosen


def _indices(slots: PoolSlots) -> Tensor | slice:
    return slots.indices if slots.start is None else slice(slots.start, slots.start + slots.count)
