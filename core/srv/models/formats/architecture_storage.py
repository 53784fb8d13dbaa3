"""Converts the tensors of a checkpoint that an architecture stores otherwise than its layers hold them.

Owns the order of rows; fused experts are divided before (`srv.models.formats.fused_experts`). Must not know files,
names of architectures or quantization: what it makes of a tensor is converted further by the format of the quantization
method. Scales per row are ordered like the rows; those of blocks of rows stay, since `srv.models.choice` lets only
weights through whose rows stay within their blocks.

    one KV head after another                        all queries, all keys, all values
    q0 q1 k0 v0 │ q2 q3 k1 v1        ──►             q0 q1 q2 q3 │ k0 k1 │ v0 v1

    adjacent rotary pairs                            pairs half the rotated dimensions apart
    a0 b0 a1 b1 │ rest               ──►             a0 a1 b0 b1 │ rest
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from srv.models.formats.rotary_rows import INDEXER_NORM, RotaryRows, rotary_rows
from srv.models.formats.storage import StorageFormat
from srv.models.formats.stored_weights import StoredWeights
from srv.specs import AttentionLayer

_NORMS = (".q_norm.", ".k_norm.", f".{INDEXER_NORM}.")  # of each head, whose weights have the order of the rows
_BY_ROWS = ("weight", "bias")


class ArchitectureStorage(StorageFormat):
    """`layer`: the attention of the whole model's layers. `rotary_dim`: the interleaved dimensions per head, or 0."""

    def __init__(self, weights: StoredWeights, layer: AttentionLayer, rotary_dim: int, inner: StorageFormat) -> None:
        self._weights, self._inner = weights, inner
        self._heads, self._kv_heads, self._dim = layer.heads, layer.kv_heads, layer.head_dim
        own = weights.interleaved_indexer
        self._rotated = {f".{name}.": rows for rows in rotary_rows(layer, rotary_dim, own) for name in rows.layers}
        if rotary_dim and layer.latent is None:
            self._rotated |= dict.fromkeys(_NORMS, RotaryRows((), 1, layer.head_dim, 0, rotary_dim))
        self._outputs: dict[str, int] = {}  # of each layer, once `shapes` has seen its weight

    def parts(self, name: str) -> tuple[str, ...]:
        return tuple(part for own in self._weights.parts(name) for part in self._inner.parts(own))

    def is_read_whole(self, name: str) -> bool:
        return super().is_read_whole(name) or self._weights.is_transposed(name) or self._inner.is_read_whole(name)

    def unused(self, names: Collection[str]) -> set[str]:
        return self._inner.unused(names)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        of_attention = [self._heads * self._dim, self._kv_heads * self._dim, self._kv_heads * self._dim]
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            parts = self._weights.parts(name)
            shape = tuple(reversed(shape)) if self._weights.is_transposed(name) else shape
            layer, _, suffix = name.rpartition(".")
            if suffix == "weight":
                self._outputs[layer] = shape[0] if shape else 1
            rows = of_attention if len(parts) == len(of_attention) else [shape[0] // 2 if shape else 0] * 2
            divided = len(parts) > 1 and shape[:1] == (sum(rows),)  # otherwise the shape is reported
            found |= (
                {part: (count, *shape[1:]) for part, count in zip(parts, rows, strict=True)}
                if divided
                else {name: shape}
            )
        return self._inner.shapes(found)

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        parts = self._weights.parts(name)
        if self._weights.is_transposed(name):
            stored = stored.t()
        tensors: tuple[Tensor, ...] = (stored,)
        if len(parts) > 1:
            tensors = self._divided(stored) if len(parts) == len("qkv") else stored.chunk(2)
        converted: dict[str, Tensor] = {}
        for part, tensor in zip(parts, tensors, strict=True):
            converted |= self._inner.convert(part, self._in_pairs(part, tensor))
        return converted

    def _divided(self, fused: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values; a weight [rows, in] or a bias [rows]."""
        rest, dim, group = fused.shape[1:], self._dim, self._heads // self._kv_heads
        if self._weights.rows == "parts":
            return torch.split(fused, [self._heads * dim, self._kv_heads * dim, self._kv_heads * dim])
        groups = fused.reshape(self._kv_heads, group + 2, dim, *rest)
        return tuple(part.reshape(-1, *rest) for part in torch.split(groups, [group, 1, 1], 1))

    def _in_pairs(self, name: str, rows: Tensor) -> Tensor:
        """A weight or bias, or scales of its rows, with rotary pairs half the rotated dimensions apart."""
        found = next((each for part, each in self._rotated.items() if part in name), None)
        if found is None or not self._is_by_rows(name, rows):
            return rows
        flat = rows.flatten() if any(each in name for each in _NORMS) else rows
        order = torch.tensor(found.order())
        return flat.reshape(-1, found.dim, *flat.shape[1:])[:, order].reshape(rows.shape)

    def _is_by_rows(self, name: str, stored: Tensor) -> bool:
        """Whether a tensor has the rows of its layer; scales of a whole weight, or of its blocks, have not."""
        layer, _, suffix = name.rpartition(".")
        if suffix in _BY_ROWS:
            return True
        return stored.dim() > 0 and stored.shape[0] == self._outputs.get(layer)
