"""Parts of Gemma 3n and Gemma 4: inputs of single layers, attention with the keys of lower layers, experts beside an
MLP, and several residual streams.

AltUp (Baykal et al. 2023, arXiv:2301.13310) predicts all streams from each other, and corrects them by what a layer
makes of the active one. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from srv.models.blueprint import Attention, Embedding, Linear, MoE, Norm, Part, Tensors

_FLOAT32 = 4  # bytes
_COPIES = 4  # of all streams that exist at the same time: as they were, predicted, corrected, and a product


@dataclass(frozen=True)
class ReadingAttention(Attention):
    """Attention with the keys and values of the layer with number `source`, whose cache it reads; `qkv` is of queries.

    `k_norm` is None. Its size, heads and window are those of that layer.
    """

    source: int = field(kw_only=True)

    def cache(self, dtype: str) -> None:
        return None


@dataclass(frozen=True)
class LayerInputs(Part):
    """What each layer adds of its own, of `size` elements per layer: rows of `table` by token, and a projection of the
    embedding with its norm.
    """

    table: Embedding
    projection: Linear
    norm: Norm
    size: int

    def step_bytes(self, item: int) -> int:
        """Bytes of temporary tensors per token; `item`: bytes per element of the model's dtype."""
        return 4 * self.table.size * item


@dataclass(frozen=True)
class LayerInput(Part):
    """norm(projection(gelu(gate(x)) · the layer's own input))."""

    gate: Linear
    projection: Linear
    norm: Norm


@dataclass(frozen=True)
class StreamProjections(Part):
    """The streams after the first one begin with projections of the embedding, of the same magnitude."""

    projections: Linear


@dataclass(frozen=True)
class StreamMean(Part):
    """After the last layer: the mean of the first stream and of projections of the others, of the same magnitude."""

    projections: tuple[Linear, ...]

    def parts(self) -> Iterator[tuple[str, Part]]:
        return ((part.name, part) for part in self.projections)


@dataclass(frozen=True)
class AltUp(Part):
    """Predicts and corrects `number` streams, of which a layer reads the `active` one. `scales`: what is added to the
    others follows from the active one times `scale`.
    """

    scale: Tensors
    corrections: Linear
    predictions: Linear
    router: Linear
    router_norm: Norm
    number: int
    active: int
    scales: bool

    def step_bytes(self, item: int) -> int:
        """As of `LayerInputs`."""
        return _COPIES * self.number * self.router_norm.size * item


@dataclass(frozen=True)
class Laurel(Part):
    """x + norm(right(left(x))), a residual of low rank beside attention."""

    left: Linear
    right: Linear
    norm: Norm


@dataclass(frozen=True)
class SideExperts(MoE):
    """Experts that read the residual itself, beside an MLP (Gemma 4). `router_norm`: of what the router reads, which
    `scales` then multiply, as they do the weights of experts. `before`, `after`: the norms of inputs and results.
    `beside`: of the result of the MLP.
    """

    router_norm: Norm = field(kw_only=True)
    scales: Tensors = field(kw_only=True)
    before: Norm = field(kw_only=True)
    after: Norm = field(kw_only=True)
    beside: Norm = field(kw_only=True)


@dataclass(frozen=True)
class LayerScale(Tensors):
    """A number by which the residual is multiplied after a layer."""
