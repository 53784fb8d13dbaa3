"""Which rows of a weight change places when adjacent rotary pairs become pairs half the rotated dimensions apart.

Torch-free: a plan asks as well as the loader (`srv.models.formats.architecture_storage`). Must not know quantization.

    of each head        first rows │ a0 b0 a1 b1 │ rest     ──►     first rows │ a0 a1 b0 b1 │ rest
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from srv.specs import AttentionLayer

INDEXER_NORM = "indexer.k_norm"  # a layer norm of index keys, whose weights have the order of the rows


class RotaryRows(NamedTuple):
    """The rows of the weights of `layers`, by the last parts of their names: `heads` times `dim` rows.

    Of each `dim` rows, `rotary_dim` are in pairs, from the row `first` on.
    """

    layers: tuple[str, ...]
    heads: int
    dim: int
    first: int
    rotary_dim: int

    def order(self) -> list[int]:
        """Of the `dim` rows of a head, which one comes first, second, and so on."""
        end = self.first + self.rotary_dim
        first, second = range(self.first, end, 2), range(self.first + 1, end, 2)
        return [*range(self.first), *first, *second, *range(end, self.dim)]

    def stay_within(self, block: int) -> bool:
        """Whether the rows that change places are in one block of `block` rows in each head."""
        begins = (head * self.dim + self.first for head in range(self.heads))
        return all(begin // block == (begin + self.rotary_dim - 1) // block for begin in begins)


def rotary_rows(layer: AttentionLayer, rotary_dim: int, indexer: bool = False) -> tuple[RotaryRows, ...]:
    """Those of the projections of a layer whose heads have `rotary_dim` interleaved dimensions; () for none.

    The rotated dimensions are the first ones of a head. In latent attention they are the last ones of a query, and of
    the vector that is compressed; in an indexer, whose rows are reordered if `indexer` is set, the first ones again.
    """
    if not rotary_dim:
        return ()
    latent = layer.latent
    if latent is None:
        return (
            RotaryRows(("q_proj",), layer.heads, layer.head_dim, 0, rotary_dim),
            RotaryRows(("k_proj",), layer.kv_heads, layer.head_dim, 0, rotary_dim),
        )
    own = (
        RotaryRows(("q_proj", "q_gate_proj", "q_b_proj"), layer.heads, layer.head_dim, latent.key_dim, rotary_dim),
        RotaryRows(("kv_a_proj_with_mqa",), 1, latent.latent_dim + rotary_dim, latent.latent_dim, rotary_dim),
    )
    if layer.indexer is None or not indexer:
        return own
    heads, dim = layer.indexer.heads, layer.indexer.dim
    queries = RotaryRows(("indexer.wq_b",), heads, dim, 0, rotary_dim)
    return (*own, queries, RotaryRows(("indexer.wk", INDEXER_NORM), 1, dim, 0, rotary_dim))


def with_gates(layer: AttentionLayer) -> AttentionLayer:
    """A layer as checkpoints have it whose queries are each followed by a gate of the size of a value."""
    gate = 0 if layer.latent is None else layer.latent.value_dim
    return dataclasses.replace(layer, head_dim=layer.head_dim + gate)


def crossing_rows(layers: Iterable[AttentionLayer], rotary_dim: int, block: int) -> RotaryRows | None:
    """The first rows of a model that would leave their block of `block` rows; None if none would."""
    rows = dict.fromkeys(each for layer in layers for each in rotary_rows(layer, rotary_dim, indexer=True))
    return next((each for each in rows if not each.stay_within(block)), None)
