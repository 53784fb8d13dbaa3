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
from torch import Tensor

from srv.models.blueprint.streams import StreamMixing
from srv.models.layers.weight_module import WeightModule
from srv.models.modules.place import Place


class StreamMixer(WeightModule):
    """fn [groups * N, N * H], base [groups * N], scale [groups], all float32."""

    def __init__(self, part: StreamMixing, place: Place) -> None:
        super().__init__()
        self.part, self.prefix = part, place.within(part).prefix
        self.magnitude, self.eps, self.norm_eps = part.magnitude, part.eps, part.norm_eps
        self.fn, self.base, self.scale = (
            place.context.empty(*weight.shape, dtype=torch.float32) for weight in part.weights()
        )

    def gates(self, streams: Tensor) -> Tensor:
        """[T, N, H] -> sigmoids float32 [groups, T, N]."""
        flat = streams.flatten(1).float()
        inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        logits = (F.linear(flat, self.fn) * inverse).view(len(flat), len(self.scale), -1)
        return (logits * self.scale[:, None] + self.base.view(len(self.scale), -1)).sigmoid().transpose(0, 1)

    def weighted(self, gates: Tensor, streams: Tensor) -> Tensor:
        """The sum of the streams [T, N, H] by their gates [T, N]: [T, H] of the streams' dtype."""
        return ((gates + self.eps).unsqueeze(-1) * streams).sum(1).to(streams.dtype)

    def forward(self, streams: Tensor) -> Tensor:
        """All streams mixed to one, after the last layer: [T, N, H] -> [T, H]."""
        return self.weighted(self.gates(streams)[0], streams)

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """[T, N, H] -> (what a part of a layer reads [T, H], the weights of its result float32 [T, N])."""
        before, after = self.gates(streams)
        return self.weighted(before, streams), self.magnitude * after + self.eps

    def join(self, streams: Tensor, result: Tensor, weights: Tensor) -> Tensor:
        """The streams [T, N, H] with the result of the part [T, H], by `weights` of `read`."""
        return (weights.unsqueeze(-1) * result.float().unsqueeze(1) + streams.float()).to(streams.dtype)

    def weight_views(self) -> dict[str, Tensor]:
        names = (f"{self.prefix}.{weight.name}" for weight in self.part.weights())
        return dict(zip(names, (self.fn, self.base, self.scale), strict=True))
