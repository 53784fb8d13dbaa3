"""Sampling on the host: in the native library, or with torch operators without it.

Owns how a token is chosen among the kept ones; the batch has the filters and the random numbers.

A row is sampled in one of three ways, selected by that row alone, so that other rows cannot change its token:

    temperature 0    argmax, the lowest id among equals
    no filter        first token in vocabulary order whose cumulative weight exceeds uniform x total
    any filter       likewise among the kept tokens, by descending logit, then token id

Weights are exp((logit - largest) / temperature), float32. With torch their sums are float64. For rows with filters, it
looks at the largest few hundred logits first, then at more, then at all, until the token is certain; the same values
are added in the same order in each case. (For the native library see sampling.cpp.)
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from srv.platform.interface import BackendContext, SamplingBatch
from srv_cpu.ops import NATIVE_FLOATS
from srv_kernels.cpu.library import load

_TOP_P_CANDIDATES = 256  # more than most top-p sets have
_GROWTH = 8  # factor for rows that need more candidates; a full sort costs ten times as much as 2,000 candidates
_TIE_SLACK = 32  # candidates beyond top_k, to include equal logits at its boundary
_SORT_ELEMENTS = 1 << 20  # elements per sort: limits temporary memory to about 32 MiB


class CpuSampling:
    """The "pytorch" sampling backend of the CPU platform."""

    def __init__(self, context: BackendContext) -> None:
        self._native: ModuleType | None = None
        if load().library is not None:
            self._native = importlib.import_module("srv_kernels.cpu.native_ops")

    def most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `srv.platform.interface.GreedySampling`."""
        if self._native is not None and logits.dtype in NATIVE_FLOATS:
            return self._native.most_likely(logits)
        wide = logits.float()
        finite = wide.amax(-1).isfinite()
        return _most_likely(wide).masked_fill_(~finite, 0), finite

    def sample(self, batch: SamplingBatch) -> torch.Tensor:
        """int64 [rows]. See `srv.platform.interface.SamplingBackend`.

        Rows without finite logits get any token of the vocabulary; the caller discards it.
        """
        if self._native is not None:
            return self._native.draw(
                batch.logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform
            )
        return _draw(batch)


def _draw(batch: SamplingBatch) -> torch.Tensor:
    if batch.all_greedy:
        return _most_likely(batch.logits)
    greedy = batch.temperature == 0
    filtered = (batch.top_k < batch.logits.shape[1]) | (batch.top_p < 1) | (batch.min_p > 0)
    tokens = torch.empty(len(greedy), dtype=torch.int64)
    for mask, draw in (
        (greedy, lambda rows: _most_likely(rows.logits)),
        (~greedy & ~filtered, _draw_unfiltered),
        (~greedy & filtered, _draw_filtered),
    ):
        index = mask.nonzero().squeeze(1)
        if len(index):
            tokens[index] = draw(_Rows.of(batch).select_rows(index))
    return tokens


@dataclass(frozen=True, slots=True)
class _Rows:
    logits: torch.Tensor  # float32 [n, vocab]; the others [n, 1]
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def of(cls, batch: SamplingBatch) -> _Rows:
        columns = (batch.temperature, batch.top_k.long(), batch.top_p, batch.min_p, batch.uniform)
        return cls(batch.logits, *(column.unsqueeze(1) for column in columns))

    def select(self, index: torch.Tensor) -> _Rows:
        columns = (self.logits, self.temperature, self.top_k, self.top_p, self.min_p, self.uniform)
        return _Rows(*(column.index_select(0, index) for column in columns))

    def select_rows(self, index: torch.Tensor) -> _Rows:
        """The rows at `index`, in ascending order; without a copy if these are all rows."""
        return self if len(index) == len(self.logits) else self.select(index)

    def weights(self) -> torch.Tensor:
        """float32 [n, vocab]; 1 for the most likely token."""
        return (self.logits - self.logits.amax(-1, keepdim=True)).div_(self.temperature).exp_()


def _blocks(matrix: torch.Tensor) -> torch.Tensor | None:
    """[n, vocab] viewed as [n, blocks, size]: reducing blocks first is many times faster than needs_total rows."""
    for size in (256, 128, 64, 32):
        if matrix.shape[1] % size == 0:
            return matrix.view(matrix.shape[0], -1, size)
    return None


def _pick(blocks: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """blocks[i, which[i]]: [n, size] from [n, blocks, size] and int64 [n, 1]."""
    return blocks.gather(1, which.unsqueeze(2).expand(-1, 1, blocks.shape[2])).squeeze(1)


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    blocks = _blocks(logits) if logits.is_contiguous() else None
    if blocks is None:
        return logits.max(-1).indices
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    return (block * blocks.shape[2] + _pick(blocks, block).argmax(-1, keepdim=True)).squeeze(1)


def _below_total(thresholds: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Thresholds, has_top_k to below the totals, so that rounding cannot lead past the last token of nonzero weight."""
    return torch.minimum(thresholds, torch.nextafter(totals, torch.zeros_like(totals)))


def _first_above(cumulative: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """int64 [n, 1]: the first index whose cumulative weight exceeds the threshold; within range even for NaN."""
    return torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=cumulative.shape[1] - 1)


def _draw_unfiltered(rows: _Rows) -> torch.Tensor:
    weights = rows.weights()
    blocks = _blocks(weights)
    if blocks is None:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        totals = cumulative[:, -1:]
        return _first_above(cumulative, _below_total(rows.uniform * totals, totals)).squeeze(1)
    outer = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    totals = outer[:, -1:]
    thresholds = _below_total(rows.uniform * totals, totals)
    block = _first_above(outer, thresholds)
    before = torch.where(block > 0, outer.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = _pick(blocks, block).cumsum(-1, dtype=torch.float64)
    offset = _first_above(inner, _below_total(thresholds - before, inner[:, -1:]))
    return (block * blocks.shape[2] + offset).squeeze(1)


def _draw_filtered(rows: _Rows) -> torch.Tensor:
    """Looks at more and more candidates until the token of every row is certain."""
    vocab = rows.logits.shape[1]
    has_top_k = rows.top_k < vocab
    totals = torch.zeros_like(rows.uniform)
    needs_total = (~has_top_k & (rows.top_p < 1)).squeeze(1).nonzero().squeeze(1)
    if len(needs_total):
        totals[needs_total] = _totals(rows.select_rows(needs_total).weights())
    width = 0 if has_top_k.all() else _TOP_P_CANDIDATES
    if has_top_k.any():
        width = max(width, int(rows.top_k[has_top_k].max()) + _TIE_SLACK)
    tokens = torch.empty(len(totals), dtype=torch.int64)
    pending = torch.arange(len(totals))
    while len(pending) and width < vocab // _GROWTH:
        part = rows.select_rows(pending)
        tokens[pending], certain = _draw_ordered(part, *_largest(part.logits, width), totals[pending])
        pending, width = pending[~certain], width * _GROWTH
    if len(pending):
        tokens[pending] = _draw_sorted(rows.select_rows(pending), totals[pending])
    return tokens


def _totals(weights: torch.Tensor) -> torch.Tensor:
    """float64 [n, 1]: each row's sum, in an order that does not depend on the number of rows."""
    blocks = _blocks(weights)
    if blocks is None:
        return weights.cumsum(-1, dtype=torch.float64)[:, -1:]
    return blocks.sum(-1, dtype=torch.float64).cumsum(-1)[:, -1:]


def _largest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest logits and their token ids, by descending logit, then token id."""
    values, ids = logits.topk(width, dim=-1, sorted=False)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _draw_sorted(rows: _Rows, totals: torch.Tensor) -> torch.Tensor:
    step = max(1, _SORT_ELEMENTS // rows.logits.shape[1])
    parts = []
    for begin in range(0, len(totals), step):
        index = torch.arange(begin, min(begin + step, len(totals)))
        part = rows.select(index)
        values, ids = part.logits.sort(dim=-1, descending=True, stable=True)
        parts.append(_draw_ordered(part, values, ids, totals[index])[0])
    return torch.cat(parts)


def _draw_ordered(
    rows: _Rows, values: torch.Tensor, ids: torch.Tensor, totals: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples from sorted candidates: `values` and `ids`, [n, width], are the row's largest logits.

    `totals`, float64 [n, 1]: the weight of the needs_total vocabulary, for rows with top_p and without top_k. Returns
    the tokens, int64 [n], and whether each is certain: the kept tokens end before the candidates do, and no logit
    outside of the candidates equals the last kept one.
    """
    vocab, width = rows.logits.shape[1], values.shape[1]
    weights = ((values - values[:, :1]) / rows.temperature).exp_()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    width_of_row = rows.top_k.clamp(max=width)
    totals = torch.where(rows.top_k < vocab, cumulative.gather(1, width_of_row - 1), totals)
    bound = torch.where(rows.top_p < 1, rows.top_p * totals, torch.inf)
    in_nucleus = 1 + (cumulative[:, :-1] < bound).sum(-1, keepdim=True)
    within_min_p = (weights >= rows.min_p).sum(-1, keepdim=True)
    width_of_row = torch.minimum(torch.minimum(width_of_row, in_nucleus), within_min_p).clamp_(min=1)
    mass = cumulative.gather(1, width_of_row - 1)
    chosen = _first_above(cumulative, _below_total(rows.uniform * mass, mass))
    certain = (values.gather(1, width_of_row - 1) > values[:, -1:]) | (weights[:, -1:] == 0)
    if width == vocab:
        certain = torch.ones_like(certain)
    return ids.gather(1, chosen).squeeze(1), certain.squeeze(1)
