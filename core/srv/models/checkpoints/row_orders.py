"""The order in which layers have the rows of a checkpoint's matrices: its rules, with the sizes of a model. Torch-free.

A plan asks as well as the loader: which rows change places, and whether they stay within blocks that share a scale.

    one KV head after another                        all queries, all keys, all values
    q0 q1 k0 v0 │ q2 q3 k1 v1        ──►             q0 q1 q2 q3 │ k0 k1 │ v0 v1

    adjacent rotary pairs of each head               pairs half the rotated dimensions apart
    first rows │ a0 b0 a1 b1 │ rest  ──►             first rows │ a0 a1 b0 b1 │ rest
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from srv.models.checkpoints.rules import QKV, WeightMapping
from srv.specs import AttentionLayer

INDEXER_NORM = "indexer.k_norm"  # a layer norm of index keys, whose weights have the order of the rows


class RowOrder(NamedTuple):
    """Of every `len(period)` rows, which one of the checkpoint comes first, second, and so on; this `repeats` times."""

    period: tuple[int, ...]
    repeats: int = 1

    @property
    def rows(self) -> list[int]:
        size = len(self.period)
        return [start * size + row for start in range(self.repeats) for row in self.period]

    @property
    def moves(self) -> bool:
        """Whether any row changes places."""
        return self.period != tuple(range(len(self.period)))

    def of_blocks(self, block: int) -> list[int] | None:
        """The order of blocks of `block` rows; None if rows would leave the block that they share a scale with."""
        rows = self.rows
        blocks = [{row // block for row in rows[begin : begin + block]} for begin in range(0, len(rows), block)]
        return None if any(len(each) > 1 for each in blocks) else [each.pop() for each in blocks]


_NO_ORDERS: Mapping[str, RowOrder] = MappingProxyType({})


def swapped_halves(outputs: int) -> RowOrder:
    half = outputs // 2
    return RowOrder((*range(half, outputs), *range(half)))


class RotaryRows(NamedTuple):
    """The rows of the weights of `layers`, by the last parts of their names: `heads` times `dim` rows.

    Of each `dim` rows, `rotary_dim` are in pairs, from the row `first` on.
    """

    layers: tuple[str, ...]
    heads: int
    dim: int
    first: int
    rotary_dim: int

    def order(self) -> RowOrder:
        end = self.first + self.rotary_dim
        first, second = range(self.first, end, 2), range(self.first + 1, end, 2)
        return RowOrder((*range(self.first), *first, *second, *range(end, self.dim)), self.heads)

    def stay_within(self, block: int) -> bool:
        """Whether the rows that change places are in one block of `block` rows in each head."""
        begins = (head * self.dim + self.first for head in range(self.heads))
        return all(begin // block == (begin + self.rotary_dim - 1) // block for begin in begins)


def rotary_rows(layer: AttentionLayer, rotary_dim: int, indexer: bool = False) -> tuple[RotaryRows, ...]:
    """Those of the weights of a layer whose heads have `rotary_dim` adjacent dimensions; () for none.

    The rotated dimensions are the first ones of a head, also in norms of each head. In latent attention they are the
    last ones of a query, and of the vector that is compressed; in an indexer, whose rows are permuted if `indexer` is
    set, the first ones again.
    """
    if not rotary_dim:
        return ()
    latent = layer.latent
    if latent is None:
        return (
            RotaryRows(("q_proj",), layer.heads, layer.head_dim, 0, rotary_dim),
            RotaryRows(("k_proj",), layer.kv_heads, layer.head_dim, 0, rotary_dim),
            RotaryRows(("q_norm", "k_norm"), 1, layer.head_dim, 0, rotary_dim),
        )
    projections = (
        RotaryRows(("q_proj", "q_gate_proj", "q_b_proj"), layer.heads, layer.head_dim, latent.key_dim, rotary_dim),
        RotaryRows(("kv_a_proj_with_mqa",), 1, latent.latent_dim + rotary_dim, latent.latent_dim, rotary_dim),
    )
    if layer.indexer is None or not indexer:
        return projections
    heads, dim = layer.indexer.heads, layer.indexer.dim
    queries = RotaryRows(("indexer.wq_b",), heads, dim, 0, rotary_dim)
    return (*projections, queries, RotaryRows(("indexer.wk", INDEXER_NORM), 1, dim, 0, rotary_dim))


def crossing_rows(layers: Iterable[AttentionLayer], rotary_dim: int, block: int) -> RotaryRows | None:
    """The first rows of a model that would leave their block of `block` rows; None if none would."""
    rows = dict.fromkeys(each for layer in layers for each in rotary_rows(layer, rotary_dim, indexer=True))
    return next((each for each in rows if not each.stay_within(block)), None)


class SizedRules:
    """The rules of a checkpoint with the sizes of one model.

    `attention`: the layers of the whole model. `rotary_dim`: the dimensions per head whose rotary pairs are adjacent.
    `unit_rows`: the names of matrices whose rows are divided by their norms.
    `stored_orders`: further layers and tensors with rows in another order, by the last parts of their names.
    """

    def __init__(
        self,
        mapping: WeightMapping,
        attention: Sequence[AttentionLayer],
        rotary_dim: int,
        unit_rows: Collection[str] = (),
        stored_orders: Mapping[str, RowOrder] = _NO_ORDERS,
    ) -> None:
        self.unit_rows = unit_rows
        gated = mapping.rotary is not None and mapping.rotary.gated_queries
        self.mapping, self._rotary_dim, self.stored_orders = mapping, rotary_dim, stored_orders
        self._attention = tuple(map(_with_gates, attention) if gated else attention)
        orders = dict(self._of_attention(self._attention[0])) if attention else {}
        orders |= stored_orders
        self._orders: Mapping[str, RowOrder] = {name: order for name, order in orders.items() if order.moves}
        self._swapped = tuple(name for name, rows in mapping.permuted.items() if rows == "swapped_halves")

    def _of_attention(self, layer: AttentionLayer) -> Iterator[tuple[str, RowOrder]]:
        indexer = self.mapping.rotary is not None and self.mapping.rotary.indexer
        rotated = {name: rows.order() for rows in rotary_rows(layer, self._rotary_dim, indexer) for name in rows.layers}
        yield from rotated.items()
        fused = self.mapping.qkv()
        if fused is not None:
            parts = zip(QKV, _fused_rows(layer, self.mapping.permuted.get(fused) == "kv_heads"), strict=True)
            found = [[rows[row] for row in rotated[part].rows] if part in rotated else rows for part, rows in parts]
            yield fused, RowOrder(tuple(row for rows in found for row in rows))

    @property
    def permuted(self) -> tuple[str, ...]:
        """The last parts of the names of layers whose rows change places."""
        return (*self._orders, *self._swapped)

    def order(self, layer: str, outputs: int) -> RowOrder | None:
        """Of a matrix or a norm, by its name; None if its rows stay. `outputs`: the rows of the matrix."""
        found = next((order for name, order in self._orders.items() if layer.endswith(f".{name}")), None)
        if found is None and any(layer.endswith(f".{name}") for name in self._swapped):
            return swapped_halves(outputs)
        return found

    def split_sizes(self, name: str, rows: int) -> list[int]:
        """The rows of each part that a tensor of `rows` rows is divided into; [] if it is not fused."""
        rule = self.mapping.split_rule(name)
        if rule is None:
            return []
        if rule.parts != QKV:
            return [rows // len(rule.parts)] * len(rule.parts)
        layer = self._attention[0]
        return [layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.kv_heads * layer.head_dim]

    def leaves_blocks(self, names: Collection[str], block: int) -> str | None:
        """The clause that says which rows of layers with these names in `permuted` would leave blocks of `block`."""
        found = crossing_rows(self._attention, self._rotary_dim, block)
        if found is not None and any(name in names for name in found.layers):
            rows = f"the {self._rotary_dim} rotary rows of a head of {found.layers[-1]}"
            return f"{rows} are not within one of its blocks of {block} rows"
        fused = self.mapping.qkv()
        if fused is not None and fused in names and self._orders[fused].of_blocks(block) is None:
            return f"the rows of a head of {fused} are not whole blocks of {block} rows"
        return None


def _with_gates(layer: AttentionLayer) -> AttentionLayer:
    """A layer as checkpoints have it whose queries are each followed by a gate of the size of a value."""
    gate = 0 if layer.latent is None else layer.latent.value_dim
    return dataclasses.replace(layer, head_dim=layer.head_dim + gate)


def _fused_rows(layer: AttentionLayer, by_kv_head: bool) -> tuple[list[int], list[int], list[int]]:
    """The rows of all queries, all keys and all values in a fused matrix of a checkpoint."""
    heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
    if not by_kv_head:
        keys, values = heads * dim, (heads + kv_heads) * dim
        return list(range(keys)), list(range(keys, values)), list(range(values, values + kv_heads * dim))
    group = heads // kv_heads
    size = (group + 2) * dim  # of a KV head with its queries, its key and its value

    def rows(begin: int, end: int) -> list[int]:
        return [head * size + row for head in range(kv_heads) for row in range(begin * dim, end * dim)]

    return rows(0, group), rows(group, group + 1), rows(group + 1, group + 2)
