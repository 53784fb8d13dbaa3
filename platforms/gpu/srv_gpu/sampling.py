"""Sampling on GPUs, by inverse transform sampling with the batch's random numbers.

    pytorch    sorts each row that has filters; tokens in the order of their ids
    triton     `srv_kernels.triton.sampling`: no sort, exact sums of integer weights

A row's result depends on that row alone: a filter that only other rows need leaves it exactly as it was.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.platform.interface import BackendContext, SamplingBatch

_BLOCK = 256  # tokens per partial sum, so that the rounding error does not grow with the vocabulary
_BELOW_ONE = 1 - 2.0**-24  # the largest float32 below one: any sum times this is below the sum


class TorchSampling:
    """The "pytorch" sampling backend. Weights are float32, since float64 is slow on consumer GPUs."""

    def __init__(self, context: BackendContext) -> None:
        """The backend has no state."""

    def sample(self, batch: SamplingBatch) -> Tensor:
        """int64 [rows]. See `srv.platform.interface.SamplingBackend`."""
        greedy = batch.logits.argmax(dim=-1)
        if batch.all_greedy:
            return greedy
        scaled = batch.logits / torch.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
        if batch.any_top_k or batch.any_top_p:
            scaled = filter_sorted(scaled, batch.top_k, batch.top_p)
        weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()
        if batch.any_min_p:
            weights = weights * (weights >= batch.min_p[:, None])
        return torch.where(batch.temperature > 0, draw(weights, batch.uniform), greedy)


class TritonSampling:
    """The "triton" sampling backend."""

    def __init__(self, context: BackendContext) -> None:
        """The backend has no state; the platform has loaded the kernels."""

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `srv.platform.interface.GreedySampling`."""
        tokens, finite = torch.ops.srv_triton.most_likely(logits)
        return tokens, finite

    def sample(self, batch: SamplingBatch) -> Tensor:
        """int64 [rows]. See `srv.platform.interface.SamplingBackend`."""
        columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform)
        tokens: Tensor = torch.ops.srv_triton.draw(batch.logits, *columns)
        return tokens


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


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """int64 [rows]: the first token, by id, whose cumulative weight exceeds `uniform` times the total.

    weights: float32 [rows, vocab], not negative.
    """
    rows, vocab = weights.shape
    blocks = F.pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    outer = blocks.sum(dim=-1).cumsum(dim=-1)
    total = outer[:, -1:]
    target = torch.minimum(uniform.float()[:, None] * total, total * _BELOW_ONE)
    block = _first_above(outer, target)
    before = torch.where(block > 0, outer.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=-1)
    within = torch.minimum(target - before, inner[:, -1:] * _BELOW_ONE)
    return (block * _BLOCK + _first_above(inner, within)).squeeze(1).clamp(max=vocab - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """int64 [rows, 1]: the first index whose cumulative sum exceeds the target; within range even for NaN."""
    return (cumulative <= target).sum(dim=-1, keepdim=True).clamp(max=cumulative.shape[-1] - 1)
