"""Multi-head latent attention in float64, and random steps of it over a paged pool."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from srv.platform.interface import AttentionBatch, KVBuffers
from srv.platform.latent import LatentAttentionBackend
from srv.specs import AttentionLayer, IndexDims, LatentDims


def latent_layer(heads: int, dims: LatentDims, index: int = 0, indexer: IndexDims | None = None) -> AttentionLayer:
    head_dim = dims.key_dim + dims.rope_dim
    return AttentionLayer(index, heads, 1, head_dim, head_dim**-0.5, latent=dims, indexer=indexer)


def best_keys(index: IndexDims, joined: Tensor, keys: Tensor) -> Tensor:
    """Which keys the last tokens of a sequence attend to, bool [Q, K]: joined `IndexDims.operands`, keys [K, D]."""
    _, queries, weights = joined.double().split(list(index.operands), 1)
    scores = torch.zeros(len(joined), len(keys), dtype=torch.float64)
    for head, query in enumerate(queries.view(len(joined), index.heads, index.dim).unbind(1)):
        scores += weights[:, head, None] * torch.relu(query @ keys.double().T * index.dim**-0.5)
    chosen = torch.zeros(scores.shape, dtype=torch.bool)
    for row, row_scores in enumerate(scores):
        visible = len(keys) - len(joined) + row + 1
        ranked = sorted(range(visible), key=lambda key: (-float(row_scores[key]), key))
        chosen[row, ranked[: index.top_k]] = True
    return chosen


def dense(
    layer: AttentionLayer, q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, chosen: Tensor | None = None
) -> Tensor:
    """The last len(q) tokens of a sequence: q [Q, heads, D], latent [K, L], rope [K, R] -> float64 [Q, heads, V]."""
    dims = layer.latent
    assert dims is not None
    heads = torch.einsum("kl,hnl->khn", latent.double(), up.double())
    keys, values = heads.split([dims.key_dim, dims.value_dim], -1)
    keys = torch.cat((keys, rope.double()[:, None].expand(-1, layer.heads, -1)), -1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scale
    hidden = torch.arange(len(latent)) > torch.arange(len(latent) - len(q), len(latent))[:, None]
    hidden = hidden if chosen is None else ~chosen
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sink_scores is not None:
        sinks = torch.tensor(layer.sink_scores, dtype=torch.float64).view(-1, 1, 1)
        scores = torch.cat((scores, sinks.expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1)[..., : len(latent)], values)


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
    seen: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    pages: dict[str, list[int]] = field(default_factory=dict)
    last: tuple[AttentionBatch, Tensor, Tensor, Tensor] | None = None  # what the last step called `forward` with
    chosen: dict[str, Tensor] = field(default_factory=dict)  # in the last step, for layers without an indexer

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
        index = self.layer.indexer
        joined = self.draw(total, 1, 0 if index is None else sum(index.operands))
        size_of_key = 0 if index is None else index.operands[0]
        expected, ends, begin = [], [], 0
        for name, count in counts:
            tokens = slice(begin, begin + count)
            new = latent[tokens, 0], rope[tokens, 0], joined[tokens, 0, :size_of_key]
            before = self.seen.get(name, tuple(tensor[:0] for tensor in new))
            self.seen[name] = now = tuple(torch.cat(pair) for pair in zip(before, new, strict=True))
            if index is not None and index.own:
                self.chosen[name] = best_keys(index, joined[tokens, 0], now[2])
            pages = self.pages.setdefault(name, [])
            while len(pages) * size < len(now[0]):
                pages.append(self._free.pop())
            expected.append(dense(self.layer, q[tokens], *now[:2], self.up, self.chosen.get(name)))
            ends.append(len(now[0]))
            begin += count
        width = max(len(self.pages[name]) for name, _ in counts)
        rows = [self.pages[name] + [0] * (width - len(self.pages[name])) for name, _ in counts]
        table = torch.tensor(rows, dtype=torch.int32, device=self.pool.tensors["latent"][0].device)
        batch = AttentionBatch([count for _, count in counts], ends, table)
        plan = self.backend.plan(batch)
        place = table.device
        compressed = torch.cat((latent, joined), -1).to(place)
        self.last = batch, q.to(place), compressed, rope.to(place)
        got = self.backend.forward(self.layer, q.to(place), compressed, rope.to(place), plan)
        return got.cpu(), torch.cat(expected)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Within the rounding of the dtype, relative to the largest result."""
    limit = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[got.dtype]
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error <= limit, f"relative error {error:.2g}, more than {limit:g}"
