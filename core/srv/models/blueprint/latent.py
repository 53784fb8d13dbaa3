"""The parts of models with multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from srv import specs
from srv.models.blueprint import ROTARY, DividedSize, Linear, Mixer, Norm, OpUse, Part, Tensors, Weight
from srv.models.layers.rope_config import RopeConfig
from srv.specs import AttentionLayer, CacheSpec, IndexDims, LatentDims


@dataclass(frozen=True)
class GatedNorm(Norm):
    """An RMS norm whose result is multiplied by a gate, of two matrices (A.X-K2)."""

    down: Linear = field(kw_only=True)
    up: Linear = field(kw_only=True)

    def weights(self) -> Iterator[Weight]:
        return (Weight(f"norm.{name}", shape) for name, shape in super().weights())


@dataclass(frozen=True)
class Indexer(Part):
    """Chooses the keys of each query in sparse latent attention. `rotated`: the size of heads of its rotation."""

    queries: Linear
    keys: Linear
    scores: Linear
    key_norm: Norm
    rotated: int
    rotary_dim: int

    def ops(self, dtype: str) -> Iterator[OpUse]:
        yield OpUse(ROTARY, {"head_dim": self.rotated, "rotary_dim": self.rotary_dim})


@dataclass(frozen=True)
class Latent(Mixer):
    """Multi-head latent attention (DeepSeek-V2). `down`: from hidden states to compressed vectors. `up`: from these to
    keys and values, which backends multiply by in ways of their own. `indexer`: None without, or if the layer uses that
    of one before it; `index`: of models that have indexers. `gate`: a projection to a gate of the result.
    """

    down: Linear
    query_norm: Norm | None
    queries: Linear
    latent_norm: Norm
    up: Tensors
    indexer: Indexer | None
    gate: Linear | None
    sinks: Tensors | None
    output: Linear
    heads: int
    head_dim: int
    dims: LatentDims
    scale: float
    rope: RopeConfig
    index: IndexDims | None = None

    @property
    def gated_queries(self) -> bool:
        """Whether each query is followed by a gate of the head's result (A.X-K2)."""
        return self.queries.unit > self.head_dim

    def layer(self, index: int) -> AttentionLayer:
        """The layer with number `index` as backends receive it."""
        indexer = None if self.index is None else self.index._replace(own=self.indexer is not None)
        sinks = self.sinks is not None
        return AttentionLayer(
            index, self.heads, 1, self.head_dim, self.scale, sinks=sinks, latent=self.dims, indexer=indexer
        )

    def ops(self, dtype: str) -> Iterator[OpUse]:
        yield OpUse(ROTARY, {"head_dim": self.dims.rope_dim, "rotary_dim": self.dims.rope_dim})

    def cache(self, dtype: str) -> CacheSpec:
        index_dim = 0 if self.index is None else self.index.dim
        indexed = () if self.indexer is None else (0,)  # numbered with the layer
        return specs.Latent((), self.dims.latent_dim, self.dims.rope_dim, index_dim=index_dim, indexed=indexed)

    @property
    def is_divided(self) -> bool:
        return self.queries.split is not None

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("attention heads", self.heads)

    def of_rank(self, ranks: int) -> Self:
        return dataclasses.replace(super().of_rank(ranks), heads=self.heads // ranks)
