"""Top-k and top-p filters, on host views."""

from __future__ import annotations

import torch
from torch import Tensor

from srv_npu_simulator.operators.checks import FLOATS, Rules

MAX_TOP_K = 1024


def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Logits, with rejected ones set to -inf; at least one per row is kept.

    logits: [rows, vocab]. k: int32 [rows], 1 to 1024; logits equal to the smallest kept one are kept too. p: [rows], in
    the dtype of logits, applied to the softmax after top-k, from the most likely token down.
    """
    rules = Rules("npu_top_k_top_p")
    rules.dtype("logits", logits, FLOATS)
    rules.dims("logits", logits, 2)
    ascending, order = logits.sort(dim=-1, stable=True)
    if k is not None:
        rules.dtype("k", k, (torch.int32,))
        rules.shape("k", k, logits.shape[:1], "one per row")
        limit = min(MAX_TOP_K, logits.shape[1])
        rules.require(bool(((k >= 1) & (k <= limit)).all()), "k", k.tolist(), f"must be within 1 and {limit}")
        smallest = ascending.gather(1, (logits.shape[1] - k.long())[:, None])
        ascending = ascending.masked_fill(ascending < smallest, float("-inf"))
    if p is not None:
        rules.same_dtype("p", p, "logits", logits.dtype)
        rules.shape("p", p, logits.shape[:1], "one per row")
        rules.require(bool(((p >= 0) & (p <= 1)).all()), "p", p.tolist(), "must be within 0 and 1")
        # The probability of a token and all less likely ones; tokens with a tail of at most 1 - p are rejected.
        tail = ascending.float().softmax(-1).cumsum(-1)
        rejected = tail <= (1 - p.float())[:, None]
        rejected[:, -1] = False
        ascending = ascending.masked_fill(rejected, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ascending)
