"""Sampling on NPUs: filters set rejected logits to minus infinity, then a token is drawn by inverse transform sampling.

Temperatures, limits and random numbers come with the batch. Weights are exp((logit - largest) / temperature) in
float32, since float64 is slow on the device; they are summed in blocks, so that the error does not grow with the
vocabulary. Tokens are in the order of their ids, and the result of a row depends on that row alone. The backends differ
in how they filter:

    pytorch    sorts every row
    ascend     calls npu_top_k_top_p for rows with a top-k of at most 1024 and for rows with top-p only; rows with a
               larger top-k are sorted, since the operator does not take it

With ties at the limit of a top-k, the operator keeps all tokens of that logit; sorting keeps exactly k tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.platform.interface import BackendContext, SamplingBatch
from srv_npu.attention import sdk_of

_BLOCK = 256  # tokens per partial sum
_BELOW_ONE = 1 - 2.0**-24  # the largest float32 below one: any sum times this is below the sum
_MAX_TOP_K = 1024  # the operator's own limit


class _Sampling(ABC):
    """Draws from the filtered distribution by inverting its cumulative sum."""

    def sample(self, batch: SamplingBatch) -> Tensor:
        """int64 [rows]. See `srv.platform.interface.SamplingBackend`."""
        greedy = batch.logits.argmax(dim=-1)
        if batch.all_greedy:
            return greedy
        temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0)
        logits = batch.logits / temperature[:, None]
        if batch.any_top_k or batch.any_top_p:
            logits = self._filter(logits, batch)
        weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
        if batch.any_min_p:
            weights = weights * (weights >= batch.min_p[:, None])
        return torch.where(batch.temperature > 0, _draw(weights, batch.uniform), greedy)

    @abstractmethod
    def _filter(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Logits, float32 [rows, vocab], with minus infinity for tokens that top-k, then top-p, reject."""


class TorchSampling(_Sampling):
    """The "pytorch" sampling backend."""

    def __init__(self, context: BackendContext) -> None:
        """The backend has no state."""

    def _filter(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return filter_sorted(logits, batch.top_k, batch.top_p)


class AscendSampling(_Sampling):
    """The "ascend" sampling backend."""

    def __init__(self, context: BackendContext) -> None:
        self._sdk = sdk_of(context)

    def _filter(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        vocab = logits.shape[-1]
        max_top_k = min(_MAX_TOP_K, vocab)
        has_top_k = batch.top_k < vocab
        filtered = logits
        if batch.any_top_p:
            nucleus = self._sdk.npu_top_k_top_p(logits, batch.top_p, None)
            filtered = torch.where((~has_top_k & (batch.top_p < 1))[:, None], nucleus, filtered)
        if batch.any_top_k:
            within_limit = self._sdk.npu_top_k_top_p(
                logits, batch.top_p, batch.top_k.clamp(1, max_top_k).to(torch.int32)
            )
            filtered = torch.where((has_top_k & (batch.top_k <= max_top_k))[:, None], within_limit, filtered)
        if batch.largest_top_k > max_top_k:
            sorted_logits = filter_sorted(logits, batch.top_k, batch.top_p)
            filtered = torch.where((has_top_k & (batch.top_k > max_top_k))[:, None], sorted_logits, filtered)
        return filtered


def filter_sorted(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits, float32 [rows, vocab], with minus infinity for tokens that top-k, then top-p, reject.

    Top-p keeps a token if the tokens before it, among those that top-k keeps, have a total probability below top-p.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    rejected = (before >= top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0)
    return torch.empty_like(logits).scatter_(-1, ids, ordered.masked_fill(rejected, float("-inf")))


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """int64 [rows]: the first token, by id, whose cumulative weight exceeds `uniform` times the total."""
    rows, vocab = weights.shape
    blocks = F.pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    outer = blocks.sum(dim=-1).cumsum(dim=-1)
    total = outer[:, -1:]
    target = torch.minimum(uniform.to(torch.float32)[:, None] * total, total * _BELOW_ONE)
    block = _first_above(outer, target)
    before = torch.where(block > 0, outer.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=-1)
    within = torch.minimum(target - before, inner[:, -1:] * _BELOW_ONE)
    return (block * _BLOCK + _first_above(inner, within)).squeeze(1).clamp(max=vocab - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """int64 [rows, 1]: the first index whose cumulative sum exceeds the target; within range even for NaN."""
    return (cumulative <= target).sum(dim=-1, keepdim=True).clamp(max=cumulative.shape[-1] - 1)
