"""The order in which layers have the rows of a checkpoint's matrices. Torch-free: a plan asks as well as the loader.

Owns it for whole stored matrices: those of quantized weights stay fused (`srv.models.formats.ordered_rows`). Must not
know quantization, beyond that a block of rows may share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from srv.models.formats.rotary_rows import rotary_rows
from srv.models.formats.stored_weights import StoredWeights
from srv.specs import AttentionLayer


def row_orders(weights: StoredWeights, layer: AttentionLayer, rotary_dim: int) -> Mapping[str, list[int]]:
    """Which stored row comes first, second, and so on, of each matrix of a layer whose rows change places.

    By the ends of their names. `layer`: the attention as checkpoints have it (`with_gates`). `rotary_dim`: the
    interleaved dimensions per head, or 0. The halves of a fused MLP are not among them (`swapped_halves`).
    """
    rotated = {
        name: [head * rows.dim + row for head in range(rows.heads) for row in rows.order()]
        for rows in rotary_rows(layer, rotary_dim, weights.interleaved_indexer)
        for name in rows.layers
    }
    orders = {f".{name}": order for name, order in rotated.items()}
    if weights.fused:
        parts = zip("qkv", _fused_parts(weights, layer), strict=True)
        found = [[rows[row] for row in rotated.get(f"{part}_proj", range(len(rows)))] for part, rows in parts]
        orders[f".{weights.fused}"] = [row for rows in found for row in rows]
    return {name: order for name, order in orders.items() if order != list(range(len(order)))}


def _fused_parts(weights: StoredWeights, layer: AttentionLayer) -> tuple[list[int], list[int], list[int]]:
    """The stored rows of all queries, all keys and all values."""
    heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
    if weights.rows == "parts":
        keys, values = heads * dim, (heads + kv_heads) * dim
        return list(range(keys)), list(range(keys, values)), list(range(values, values + kv_heads * dim))
    group = heads // kv_heads
    size = (group + 2) * dim  # of a KV head with its queries, its key and its value

    def rows(begin: int, end: int) -> list[int]:
        return [head * size + row for head in range(kv_heads) for row in range(begin * dim, end * dim)]

    return rows(0, group), rows(group, group + 1), rows(group + 1, group + 2)


def swapped_halves(outputs: int) -> list[int]:
    """The order of rows of a fused MLP whose up projection is stored first: layers have the gate first."""
    half = outputs // 2
    return [*range(half, outputs), *range(half)]


def block_order(order: Sequence[int], block: int) -> list[int] | None:
    """The order of blocks of `block` rows; None if rows would leave the block that they share a scale with."""
    blocks = [{row // block for row in order[begin : begin + block]} for begin in range(0, len(order), block)]
    return None if any(len(each) > 1 for each in blocks) else [each.pop() for each in blocks]
