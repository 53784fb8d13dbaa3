"""Sampling for the toy device: sort each row, keep a prefix, draw by inverse transform sampling.

After sorting in descending order each filter keeps a prefix, and so do all of them together. The result of a row
depends on that row alone: a filter that only other rows need leaves it exactly as it was. A few rows are
sorted at a time, which bounds the memory.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from srv.platform.interface import BackendContext, SamplingBatch
from srv_toy_device.limits import SORTED_LOGITS


class ToySampling:
    """Implements `srv.platform.interface.SamplingBackend`."""

    def __init__(self, context: BackendContext) -> None:
        """The backend has no state."""

    def sample(self, batch: SamplingBatch) -> Tensor:
        greedy = batch.logits.argmax(dim=-1)
        if batch.all_greedy:
            return greedy
        rows, vocab = batch.logits.shape
        step = max(1, SORTED_LOGITS // vocab)
        drawn = torch.cat([_draw(_select_rows(batch, slice(first, first + step))) for first in range(0, rows, step)])
        return torch.where(batch.temperature > 0, drawn, greedy)


def _select_rows(batch: SamplingBatch, rows: slice) -> SamplingBatch:
    return dataclasses.replace(
        batch,
        logits=batch.logits[rows],
        temperature=batch.temperature[rows],
        top_k=batch.top_k[rows],
        top_p=batch.top_p[rows],
        min_p=batch.min_p[rows],
        uniform=batch.uniform[rows],
    )


def _draw(batch: SamplingBatch) -> Tensor:
    """int64 [rows]: the first token, most likely first, whose cumulative weight exceeds `uniform` times the total."""
    temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0)
    scaled = batch.logits.double() / temperature[:, None]
    logits, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    weights = torch.softmax(logits, dim=-1)
    if batch.any_top_k:
        rank = torch.arange(weights.shape[-1], device=weights.device)
        weights = weights * (rank < batch.top_k[:, None])
    if batch.any_top_p:
        # A token is kept if the probability of those before it is below top_p; the first token is always kept.
        probabilities = weights / weights.sum(dim=-1, keepdim=True)
        before = probabilities.cumsum(dim=-1) - probabilities
        limit = torch.where(batch.top_p < 1, batch.top_p.double(), float("inf"))[:, None]
        first = torch.arange(weights.shape[-1], device=weights.device) == 0
        weights = weights * ((before < limit) | first)
    if batch.any_min_p:
        weights = weights * (weights >= batch.min_p.double()[:, None] * weights[:, :1])
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not let the target reach the total: the last token may have probability zero.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(batch.uniform[:, None] * total, below)
    index = (cumulative <= target).sum(dim=-1, keepdim=True)
    return tokens.gather(-1, index)[:, 0]
