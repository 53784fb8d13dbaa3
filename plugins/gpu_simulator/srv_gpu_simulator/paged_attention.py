"""Attention over a paged cache, on host views: scores and softmax in float32, one sequence after the other.

cache [pages, page_size, KV heads, D]; token t of sequence b is in page indices[indptr[b] + t // page_size].
Queries are aligned with the last keys: query i of n has the position keys - n + i.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are computed. left, right: keys before and after a query's position that it sees; -1: all."""

    scale: float
    left: int = -1
    right: int = -1
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of each sequence: int32 indptr [n + 1], indices and, for pages of several tokens, last lengths [n]."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor | None
    page_size: int

    def lengths(self) -> list[int]:
        """The tokens of each sequence. RuntimeError if the pages do not describe one, which a GPU does not check."""
        starts = self.indptr.tolist()
        lasts = self.last_page_len.tolist() if self.last_page_len is not None else [1] * (len(starts) - 1)
        lengths = []
        for row, (first, end) in enumerate(pairwise(starts)):
            if not 0 <= first <= end <= len(self.indices):
                raise RuntimeError(
                    f"pages {first} to {end} of sequence {row} are not within {len(self.indices)} indices"
                )
            if first < end and not 1 <= lasts[row] <= self.page_size:
                raise RuntimeError(
                    f"the last page of sequence {row} has {lasts[row]} tokens, not 1 to {self.page_size}: a page is "
                    "never empty, and has no more tokens than its size"
                )
            lengths.append((end - first - 1) * self.page_size + lasts[row] if first < end else 0)
        return lengths

    def gather(self, cache: Tensor, row: int, length: int) -> Tensor:
        """float32 [length, KV heads, D]: the keys or values of one sequence."""
        first = int(self.indptr[row])
        used = self.indices[first : first + -(-length // self.page_size)].long()
        if length and not 0 <= int(used.min()) <= int(used.max()) < cache.shape[0]:
            raise RuntimeError(f"sequence {row} uses pages {used.tolist()}, but the cache has {cache.shape[0]}")
        return cache[used].flatten(0, 1)[:length].float()


def attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """(float32 [n, heads, D of value], float32 log-sum-exp [n, heads], natural) of one sequence.

    query: [n, heads, D]. key, value: float32 [keys, KV heads, ...]. A query without keys has the result 0.
    """
    rows, heads, _ = query.shape
    keys = key.shape[0]
    group = heads // key.shape[1]
    grouped = query.float().unflatten(1, (-1, group))
    products = torch.einsum("nkgd,mkd->nkgm", grouped, key) * scores.scale
    if scores.soft_cap > 0:
        products = scores.soft_cap * torch.tanh(products / scores.soft_cap)
    position = torch.arange(keys - rows, keys)[:, None]
    at = torch.arange(keys)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if scores.left >= 0:
        hidden |= at < position - scores.left
    if scores.right >= 0:
        hidden |= at > position + scores.right
    products = products.masked_fill(hidden[:, None, None, :], NEGATIVE_INFINITY)
    lse = products.logsumexp(-1)
    weights = (products - lse.masked_fill(lse == NEGATIVE_INFINITY, 0.0)[..., None]).exp()
    result = torch.einsum("nkgm,mkd->nkgd", weights, value)
    return result.flatten(1, 2), lse.flatten(1, 2)
