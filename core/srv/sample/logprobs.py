"""Log-probabilities under the model's own distribution: before penalties, bias, temperature and filters.

Owns the arithmetic and its way to the host. Knows nothing of slots or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from srv.types import TokenLogprob

_CHUNK_ELEMENTS = 1 << 24  # float32 scratch of 64 MiB at a time


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of n tokens; the tensors are on the host or on their way there.

    tokens, ranks: int64 [n]; logprobs: float32 [n]; top_tokens int64 and top_logprobs float32 [n, most].
    `tops[i]`: how many alternatives token i is reported with.
    Read `to_host` only after the work enqueued so far on the device's stream is done.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor
    tops: tuple[int, ...]

    def to_host(self) -> tuple[TokenLogprob, ...]:
        """One TokenLogprob a token, in order."""
        columns = zip(
            self.tokens.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_tokens.tolist(),
            self.top_logprobs.tolist(),
            self.tops,
            strict=True,
        )
        return tuple(
            TokenLogprob(token, logprob, rank, _best(token, logprob, list(zip(ids, values, strict=True))[:top]))
            for token, logprob, rank, ids, values, top in columns
        )


def _best(token: int, logprob: float, top: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Alternatives, best first, equals by token id.

    Among equals at the border a device's top-k keeps whichever it likes; the scored token itself has the
    better claim, so that a greedy token is always listed.
    """
    if top and logprob == top[-1][1] and all(token != other for other, _ in top):
        top[-1] = (token, logprob)
    return tuple(sorted(top, key=lambda pair: (-pair[1], pair[0])))


def score(logits: torch.Tensor, targets: torch.Tensor, top: int | Sequence[int] = 0) -> Scores:
    """Log-probabilities of `targets` under softmax(logits), with ranks and the most likely alternatives.

    logits: [n, vocab] of any float dtype, unchanged; targets: int64 [n] on the same device. `top`: number
    of alternatives, for all tokens or for each. Works in float32, in chunks of rows that bound the scratch
    memory, and waits for nothing.
    """
    count, vocab = logits.shape
    tops = (min(top, vocab),) * count if isinstance(top, int) else tuple(min(number, vocab) for number in top)
    most = max(tops, default=0)
    step = max(1, _CHUNK_ELEMENTS // vocab)
    parts = [_score(logits[at : at + step], targets[at : at + step], most) for at in range(0, max(count, 1), step)]
    logprobs, ranks, top_tokens, top_logprobs = (
        torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True)
    )
    return Scores(
        tokens=targets.to("cpu", non_blocking=True),
        logprobs=logprobs.to("cpu", non_blocking=True),
        ranks=ranks.to("cpu", non_blocking=True),
        top_tokens=top_tokens.to("cpu", non_blocking=True),
        top_logprobs=top_logprobs.to("cpu", non_blocking=True),
        tops=tops,
    )


def _score(logits: torch.Tensor, targets: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    raw = logits.float()
    norm = raw.logsumexp(-1, keepdim=True)
    chosen = raw.gather(-1, targets.unsqueeze(-1))
    ranks = (raw > chosen).sum(-1) + 1
    if most:
        values, tokens = raw.topk(most, dim=-1)
    else:
        values, tokens = raw[:, :0], targets[:, None][:, :0]
    return (chosen - norm).squeeze(-1), ranks, tokens, values - norm
