"""Multi-head latent attention in float64, and random steps of it over a paged pool."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from srv.platform.interface import AttentionBatch, KVBuffers
from srv.platform.latent import LatentAttentionBackend
from srv.specs import AttentionLayer, LatentDims


def latent_layer(heads: int, dims: LatentDims, index: int = 0) -> AttentionLayer:
    head_dim = dims.key_dim + dims.rope_dim
    return AttentionLayer(index, heads, 1, head_dim, head_dim**-0.5, latent=dims)


def dense(layer: AttentionLayer, q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """The last len(q) tokens of a sequence: q [Q, heads, D], latent [K, L], rope [K, R] -> float64 [Q, heads, V]."""
    dims = layer.latent
    assert dims is not None
    heads = torch.einsum("kl,hnl->khn", latent.double(), up.double())
    keys, values = heads.split([dims.key_dim, dims.value_dim], -1)
    keys = torch.cat((keys, rope.double()[:, None].expand(-1, layer.heads, -1)), -1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scale
    hidden = torch.arange(len(latent)) > torch.arange(len(latent) - len(q), len(latent))[:, None]
    return torch.einsum("hqk,khv->qhv", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


@dataclass
class LatentRows:
    """Sequences over the pool of one layer. Pages are handed out in random order, and never twice."""

    layer: AttentionLayer
    backend: LatentAttentionBackend
    pool: KVBuffers
    dtype: torch.dtype
    up: Tensor
    seed: int = 0
    magnitude: float = 1.0
    seen: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    pages: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        count = self.pool.tensors["latent"][0].shape[0] - 1
        self._free = random.Random(self.seed).sample(range(1, count + 1), count)
        self.backend.prepare(self.layer, self.up.to(self.pool.tensors["latent"][0].device))

    def draw(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self._random) * self.magnitude).to(self.dtype)

    def step(self, *counts: tuple[str, int]) -> tuple[Tensor, Tensor]:
        """The results of a step with so many new tokens of each sequence: the backend's, and those of `dense`."""
        dims, size = self.layer.latent, self.pool.layout.page_size
        assert dims is not None
        total = sum(count for _, count in counts)
        q = self.draw(total, self.layer.heads, dims.key_dim + dims.rope_dim)
        latent, rope = self.draw(total, 1, dims.latent_dim), self.draw(total, 1, dims.rope_dim)
        expected, ends, begin = [], [], 0
        for name, count in counts:
            own = slice(begin, begin + count)
            before = self.seen.get(name, (latent[:0, 0], rope[:0, 0]))
            now = torch.cat((before[0], latent[own, 0])), torch.cat((before[1], rope[own, 0]))
            self.seen[name] = now
            pages = self.pages.setdefault(name, [])
            while len(pages) * size < len(now[0]):
                pages.append(self._free.pop())
            expected.append(dense(self.layer, q[own], *now, self.up))
            ends.append(len(now[0]))
            begin += count
        width = max(len(self.pages[name]) for name, _ in counts)
        rows = [self.pages[name] + [0] * (width - len(self.pages[name])) for name, _ in counts]
        table = torch.tensor(rows, dtype=torch.int32, device=self.pool.tensors["latent"][0].device)
        plan = self.backend.plan(AttentionBatch([count for _, count in counts], ends, table))
        place = table.device
        got = self.backend.forward(self.layer, q.to(place), latent.to(place), rope.to(place), plan)
        return got.cpu(), torch.cat(expected)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Within the rounding of the dtype, relative to the largest result."""
    limit = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[got.dtype]
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error <= limit, f"relative error {error:.2g}, more than {limit:g}"
