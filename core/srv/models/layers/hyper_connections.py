"""Hyper-connections: several residual streams, which learned weights mix before and after each part of a layer.

The idea is that of Zhu et al. 2024 (arXiv:2409.19606). These are the independent hyper-connections of HY-V4, as
`HYV4HyperConnection` of transformers computes them: those of DeepSeek-V4 without the matrix that mixes the streams with
each other, so that each stream stays what it is but for what joins it.

    streams [T, N, H] ─┬─ flat, norm ─ fn ─┬─ sigmoid ─ pre [T, N] ──┐
                       │                   └─ sigmoid ─ post [T, N] ─┼──────────────┐
                       ├───────────────────────── sum over N of pre · stream ─ part ─┤ post · result
                       └──────────────────────────────────────────────────────────(+)─ streams

Weights and mixing are in float32 whatever the model's dtype is. Every rank computes all of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.models.layers.context import BuildContext
from srv.models.layers.stream_sizes import StreamSizes


class StreamMixer(nn.Module):
    """Weights that follow from the streams: `groups` of one per stream, each with a scale.

    fn [groups * N, N * H], base [groups * N], scale [groups], all float32.
    """

    def __init__(self, context: BuildContext, sizes: StreamSizes, hidden: int, groups: int) -> None:
        super().__init__()
        weights, wide = groups * sizes.number, torch.float32
        self.sizes = sizes
        self.fn = context.empty(weights, sizes.number * hidden, dtype=wide)
        self.base = context.empty(weights, dtype=wide)
        self.scale = context.empty(groups, dtype=wide)

    def gates(self, streams: Tensor) -> Tensor:
        """[T, N, H] -> sigmoids float32 [groups, T, N]."""
        flat = streams.flatten(1).float()
        inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.sizes.norm_eps)
        logits = (F.linear(flat, self.fn) * inverse).view(len(flat), len(self.scale), -1)
        return (logits * self.scale[:, None] + self.base.view(len(self.scale), -1)).sigmoid().transpose(0, 1)

    def weighted(self, gates: Tensor, streams: Tensor) -> Tensor:
        """The sum of the streams [T, N, H] by their gates [T, N]: [T, H] of the streams' dtype."""
        return ((gates + self.sizes.eps).unsqueeze(-1) * streams).sum(1).to(streams.dtype)

    def weight_views(self, name: str, prefix: str = "") -> dict[str, Tensor]:
        """By their names in checkpoints: `name`, then `prefix` and the name of the weight."""
        own = {"fn": self.fn, "base": self.base, "scale": self.scale}
        return {f"{name}.{prefix}{each}": weight for each, weight in own.items()}


class HyperConnection(StreamMixer):
    """The mixing before and after one part of a layer."""

    def __init__(self, context: BuildContext, sizes: StreamSizes, hidden: int) -> None:
        super().__init__(context, sizes, hidden, groups=2)

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """[T, N, H] -> (what the part reads [T, H], the weights of its result float32 [T, N])."""
        before, after = self.gates(streams)
        return self.weighted(before, streams), self.sizes.magnitude * after + self.sizes.eps

    def join(self, streams: Tensor, result: Tensor, weights: Tensor) -> Tensor:
        """The streams [T, N, H] with the result of the part [T, H], by `weights` of `read`."""
        return (weights.unsqueeze(-1) * result.float().unsqueeze(1) + streams.float()).to(streams.dtype)


class StreamHead(StreamMixer):
    """The mixing of all streams to one after the last layer."""

    def __init__(self, context: BuildContext, sizes: StreamSizes, hidden: int) -> None:
        super().__init__(context, sizes, hidden, groups=1)

    def forward(self, streams: Tensor) -> Tensor:
        """[T, N, H] -> [T, H]."""
        return self.weighted(self.gates(streams)[0], streams)
