"""A paged cache in random order with known keys and values, and attention in float64 one query at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ends(lengths: list[int]) -> Tensor:
    return int32([sum(lengths[:row]) for row in range(len(lengths) + 1)])


@dataclass
class Case:
    """Sequences with `keys` cached tokens each, of which the last `queries` are queried."""

    queries: list[int]
    keys: list[int]
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    page: int = 4
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None
    query: Tensor = field(init=False)
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.keys) + sum(self.keys))
        counts = [-(-keys // self.page) for keys in self.keys]
        total = sum(counts) + 3
        order = torch.randperm(total, generator=generator)
        shape = (total, self.page, self.kv_heads, self.dim)
        cached = self.cache_dtype or self.dtype
        self.key = torch.randn(shape, generator=generator).to(cached)
        self.value = torch.randn(shape, generator=generator).to(cached)
        self.query = torch.randn(sum(self.queries), self.heads, self.dim, generator=generator).to(self.dtype)
        self.indices = order[: sum(counts)].int()
        self.indptr = ends(counts)
        self.last = int32(
            [keys - (count - 1) * self.page if count else 0 for keys, count in zip(self.keys, counts, strict=True)]
        )
        self.qo_indptr = ends(self.queries)

    def cache(self, layout: str = "NHD", joint: bool = False) -> Any:
        """The cache on the device: one tensor if `joint`, otherwise keys and values."""
        parts = [one if layout == "NHD" else one.transpose(1, 2).contiguous() for one in (self.key, self.value)]
        return torch.stack(parts, 1).to("gpusim") if joint else tuple(part.to("gpusim") for part in parts)

    def expected(
        self, causal: bool = False, window: int = -1, cap: float = 0.0, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """(float64 [queries, heads, dim], natural log-sum-exp [queries, heads])."""
        scale = scale if scale is not None else self.dim**-0.5
        outs, sums = [], []
        for row, (queries, keys) in enumerate(zip(self.queries, self.keys, strict=True)):
            for at in range(queries):
                position = keys - queries + at
                seen = [
                    token
                    for token in range(keys)
                    if (not causal or token <= position) and (window < 0 or token >= position - window)
                ]
                attended = [
                    self.attend(row, int(self.qo_indptr[row]) + at, head, seen, scale, cap)
                    for head in range(self.heads)
                ]
                outs.append(torch.stack([one[0] for one in attended]))
                sums.append(torch.tensor([one[1] for one in attended], dtype=torch.float64))
        return torch.stack(outs), torch.stack(sums)

    def attend(self, row: int, at: int, head: int, seen: list[int], scale: float, cap: float) -> tuple[Tensor, float]:
        if not seen:
            return torch.zeros(self.dim, dtype=torch.float64), -math.inf
        kv_head = head * self.kv_heads // self.heads
        spots = [(int(self.indices[int(self.indptr[row]) + token // self.page]), token % self.page) for token in seen]
        keys = torch.stack([self.key[page, spot, kv_head].double() for page, spot in spots])
        values = torch.stack([self.value[page, spot, kv_head].double() for page, spot in spots])
        scores = keys @ self.query[at, head].double() * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        return scores.softmax(-1) @ values, float(scores.logsumexp(-1))
