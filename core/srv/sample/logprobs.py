"""Log-probabilities under the model's own distribution: before penalties, bias, temperature and filters.

Owns their computation and their transfer to the host. Must not know slots or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from srv.platform.transfers import Transfers
from srv.types import TokenLogprob

_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of temporary float32 memory


class ListedTokens(NamedTuple):
    """Tokens whose log-probabilities are reported, too. `ids`: int64 [n, most], where row i has counts[i] tokens."""

    ids: torch.Tensor
    counts: tuple[int, ...]


def listed_tokens(tokens: Sequence[Sequence[int]], transfers: Transfers) -> ListedTokens | None:
    """Those of each of n scored tokens, on the device; None if there are none at all."""
    counts = tuple(map(len, tokens))
    if not any(counts):
        return None
    ids = np.zeros((len(tokens), max(counts)), dtype=np.int64)
    for row, token in enumerate(tokens):
        ids[row, : len(token)] = token
    return ListedTokens(transfers.upload(ids), counts)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of n tokens; the tensors are on the host, or are being copied there asynchronously.

    tokens, ranks: int64 [n]; logprobs: float32 [n]; top_tokens int64 and top_logprobs float32 [n, most].
    `tops[i]`: how many alternatives token i is reported with. `listed`: float32 [n, most], where token i is reported
    with the first `listed_counts[i]`; None if no token is.
    Call `to_host` only when the work that is enqueued on the device's stream has finished.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor
    tops: tuple[int, ...]
    listed: torch.Tensor | None = None
    listed_counts: tuple[int, ...] = ()

    def to_host(self) -> tuple[TokenLogprob, ...]:
        """One TokenLogprob per token, in order."""
        columns = zip(
            self.tokens.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_tokens.tolist(),
            self.top_logprobs.tolist(),
            self.tops,
            strict=True,
        )
        listed_rows = repeat(()) if self.listed is None else self._listed_to_host(self.listed)
        return tuple(
            TokenLogprob(token, logprob, rank, _best(token, logprob, list(zip(ids, values, strict=True))[:top]), more)
            for (token, logprob, rank, ids, values, top), more in zip(columns, listed_rows, strict=False)
        )

    def _listed_to_host(self, listed: torch.Tensor) -> list[tuple[float, ...]]:
        return [tuple(row[:count]) for row, count in zip(listed.tolist(), self.listed_counts, strict=True)]


def _best(token: int, logprob: float, top: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The alternatives, best first; equal ones by token id.

    Which of several equal tokens a device's top-k returns last is undefined. If the scored token is one of them, it is
    listed, so that a greedy token is always among the alternatives.
    """
    if top and logprob == top[-1][1] and all(token != other for other, _ in top):
        top[-1] = (token, logprob)
    return tuple(sorted(top, key=lambda pair: (-pair[1], pair[0])))


def score(
    logits: torch.Tensor,
    targets: torch.Tensor,
    transfers: Transfers,
    top: int | Sequence[int] = 0,
    listed: ListedTokens | None = None,
) -> Scores:
    """Log-probabilities of `targets` under softmax(logits), with ranks and the most likely alternatives.

    logits: [n, vocab] of any float dtype, unchanged; targets: int64 [n] on the same device. `top`: number
    of alternatives, for all tokens or for each. `listed`: further tokens of each. Computes in float32, in chunks of
    rows that limit temporary memory, and does not synchronize with the device.
    """
    count, vocab = logits.shape
    tops = (min(top, vocab),) * count if isinstance(top, int) else tuple(min(number, vocab) for number in top)
    most = max(tops, default=0)
    step = max(1, _CHUNK_ELEMENTS // vocab)
    ids = targets[:, None][:, :0] if listed is None else listed.ids
    parts = [
        _score(logits[at : at + step], targets[at : at + step], most, ids[at : at + step])
        for at in range(0, max(count, 1), step)
    ]
    logprobs, ranks, top_tokens, top_logprobs, listed_logprobs = (
        torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True)
    )
    return Scores(
        tokens=transfers.download(targets),
        logprobs=transfers.download(logprobs),
        ranks=transfers.download(ranks),
        top_tokens=transfers.download(top_tokens),
        top_logprobs=transfers.download(top_logprobs),
        tops=tops,
        listed=None if listed is None else transfers.download(listed_logprobs),
        listed_counts=() if listed is None else listed.counts,
    )


def _score(logits: torch.Tensor, targets: torch.Tensor, most: int, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raw = logits.float()
    norm = raw.logsumexp(-1, keepdim=True)
    chosen = raw.gather(-1, targets.unsqueeze(-1))
    ranks = (raw > chosen).sum(-1) + 1
    if most:
        values, tokens = raw.topk(most, dim=-1)
    else:
        values, tokens = raw[:, :0], targets[:, None][:, :0]
    others = raw.gather(-1, ids) - norm if ids.shape[1] else raw[:, :0]
    return (chosen - norm).squeeze(-1), ranks, tokens, values - norm, others
