"""Sampling for the toy device: sort each row, keep a prefix, invert its cumulative distribution.

After sorting in descending order each filter keeps a prefix, so that together they do. A row's outcome
depends on that row alone: a filter that other rows made necessary leaves it exactly as it was. Rows are taken
a few at a time, which bounds the memory for sorting.
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
        """It keeps nothing: everything comes with the batch."""

    def sample(self, batch: SamplingBatch) -> Tensor:
        greedy = batch.logits.argmax(dim=-1)
        if batch.all_greedy:
            return greedy
        rows, vocab = batch.logits.shape
        step = max(1, SORTED_LOGITS // vocab)
        drawn = torch.cat([_draw(_part(batch, slice(first, first + step))) for first in range(0, rows, step)])
        return torch.where(batch.temperature > 0, drawn, greedy)


def _part(batch: SamplingBatch, rows: slice) -> SamplingBatch:
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
    """int64 [rows]: the first kept token, by descending probability, whose cumulative one exceeds the noise."""
    temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0)
    scaled = batch.logits.double() / temperature[:, None]
    logits, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    weights = torch.softmax(logits, dim=-1)
    if batch.any_top_k:
        rank = torch.arange(weights.shape[-1], device=weights.device)
        weights = weights * (rank < batch.top_k[:, None])
    if batch.any_top_p:
        # A token is kept if those before it do not reach top_p yet; the first one always is.
        shares = weights / weights.sum(dim=-1, keepdim=True)
        before = shares.cumsum(dim=-1) - shares
        limit = torch.where(batch.top_p < 1, batch.top_p.double(), float("inf"))[:, None]
        first = torch.arange(weights.shape[-1], device=weights.device) == 0
        weights = weights * ((before < limit) | first)
    if batch.any_min_p:
        weights = weights * (weights >= batch.min_p.double()[:, None] * weights[:, :1])
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not let the noise reach the total: the last token may be one of probability zero.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(batch.uniform[:, None] * total, below)
    place = (cumulative <= target).sum(dim=-1, keepdim=True)
    return tokens.gather(-1, place)[:, 0]
