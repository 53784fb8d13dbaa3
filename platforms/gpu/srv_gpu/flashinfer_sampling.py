"""Sampling with FlashInfer's filters, which find the bounds of top-k and top-p without sorting.

FlashInfer's own draw takes a seed and the row's place in the batch. Here the token is drawn with the batch's random
number of the row, so that a row's result does not depend on other rows. Tokens that tie at a bound are all kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv.platform.interface import BackendContext, SamplingBatch
from srv_gpu.platform import hardware_of
from srv_gpu.sampling import draw


class FlashInferSampling:
    """The "flashinfer" sampling backend."""

    def __init__(self, context: BackendContext) -> None:
        self._sampling = hardware_of(context).accelerator.library("flashinfer").sampling

    def sample(self, batch: SamplingBatch) -> Tensor:
        """int64 [rows]. See `srv.platform.interface.SamplingBackend`."""
        greedy = batch.logits.argmax(dim=-1)
        if batch.all_greedy:
            return greedy
        logits = batch.logits / torch.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
        probs = torch.softmax(logits, dim=-1)
        if batch.any_top_k:
            renormed = self._sampling.top_k_renorm_probs(probs, batch.top_k)
            probs = torch.where((batch.top_k < probs.shape[1])[:, None], renormed, probs)
        if batch.any_top_p:
            renormed = self._sampling.top_p_renorm_probs(probs, batch.top_p)
            probs = torch.where((batch.top_p < 1)[:, None], renormed, probs)
        if batch.any_min_p:
            probs = probs * (probs >= batch.min_p[:, None] * probs.amax(dim=-1, keepdim=True))
        return torch.where(batch.temperature > 0, draw(probs, batch.uniform), greedy)
