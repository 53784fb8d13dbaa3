"""Sampling on NPUs: filters set what is left out to minus infinity, then a cumulative sum is inverted.

Owns which filter serves which row, and how a token is found among the kept ones; temperature, limits and noise come
with the batch. Weights are exp((logit - largest) / temperature) in float32, since the device computes no float64 at
speed; the sum is taken block by block, so that its error does not grow with the vocabulary. Tokens are in order of
their ids, and a row's outcome depends on that row alone:

    pytorch    every row by sorting
    ascend     by npu_top_k_top_p: top-k and top-p of rows with a top-k of 1024 at most, top-p of rows without one;
               rows with a larger top-k by sorting, since the operator takes no more

At the border of a top-k the operator keeps tokens whose logits are equal to the last one kept; sorting keeps k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.platform.interface import BackendContext, SamplingBatch
from srv_npu.attention import sdk_of

_BLOCK = 256  # tokens that are added up before blocks are
_BELOW_ONE = 1 - 2.0**-24  # the largest float32 below one: a sum times it is below that sum
_MOST_K = 1024  # the operator's own limit


class _Sampling(ABC):
    """Draws by inverting the cumulative sum of what a filter keeps."""

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
        """Logits, float32 [rows, vocab], with minus infinity where top-k, then top-p, leave a token out."""


class TorchSampling(_Sampling):
    """The "pytorch" sampling backend."""

    def __init__(self, context: BackendContext) -> None:
        """It keeps nothing: everything comes with the batch."""

    def _filter(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return filter_sorted(logits, batch.top_k, batch.top_p)


class AscendSampling(_Sampling):
    """The "ascend" sampling backend."""

    def __init__(self, context: BackendContext) -> None:
        self._sdk = sdk_of(context)

    def _filter(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        vocab = logits.shape[-1]
        most = min(_MOST_K, vocab)
        limited = batch.top_k < vocab
        filtered = logits
        if batch.any_top_p:
            nucleus = self._sdk.npu_top_k_top_p(logits, batch.top_p, None)
            filtered = torch.where((~limited & (batch.top_p < 1))[:, None], nucleus, filtered)
        if batch.any_top_k:
            few = self._sdk.npu_top_k_top_p(logits, batch.top_p, batch.top_k.clamp(1, most).to(torch.int32))
            filtered = torch.where((limited & (batch.top_k <= most))[:, None], few, filtered)
        if batch.largest_top_k > most:
            many = filter_sorted(logits, batch.top_k, batch.top_p)
            filtered = torch.where((limited & (batch.top_k > most))[:, None], many, filtered)
        return filtered


def filter_sorted(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits, float32 [rows, vocab], with minus infinity where top-k, then top-p, leave a token out.

    A token is in the nucleus if the probabilities before it, of those that top-k keeps, do not reach top-p.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(place >= top_k[:, None], float("-inf"))
    shares = ordered.softmax(dim=-1)
    before = shares.cumsum(dim=-1) - shares
    outside = (before >= top_p[:, None]) & (top_p < 1)[:, None] & (place > 0)
    return torch.empty_like(logits).scatter_(-1, ids, ordered.masked_fill(outside, float("-inf")))


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """int64 [rows]: the first token, by id, at which the cumulative weight exceeds the noise's part of the whole."""
    rows, vocab = weights.shape
    blocks = F.pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    outer = blocks.sum(dim=-1).cumsum(dim=-1)
    total = outer[:, -1:]
    point = torch.minimum(uniform.to(torch.float32)[:, None] * total, total * _BELOW_ONE)
    block = _first_above(outer, point)
    before = torch.where(block > 0, outer.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=-1)
    within = torch.minimum(point - before, inner[:, -1:] * _BELOW_ONE)
    return (block * _BLOCK + _first_above(inner, within)).squeeze(1).clamp(max=vocab - 1)


def _first_above(cumulative: Tensor, point: Tensor) -> Tensor:
    """int64 [rows, 1]: the first index whose cumulative sum exceeds the point; within range even for NaN."""
    return (cumulative <= point).sum(dim=-1, keepdim=True).clamp(max=cumulative.shape[-1] - 1)
