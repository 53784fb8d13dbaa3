"""Converts the tensors of a checkpoint that an architecture stores otherwise than its layers hold them.

Owns the order of rows; fused experts are divided before (`srv.models.formats.fused_experts`). Must not know files,
names of architectures or quantization: what it makes of a tensor is converted further by the format of the quantization
method.

    one KV head after another                        all queries, all keys, all values
    q0 q1 k0 v0 │ q2 q3 k1 v1        ──►             q0 q1 q2 q3 │ k0 k1 │ v0 v1

    adjacent rotary pairs                            pairs half the rotated dimensions apart
    a0 b0 a1 b1 │ rest               ──►             a0 a1 b0 b1 │ rest
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from srv.models.formats.storage import StorageFormat
from srv.models.formats.stored_weights import StoredWeights
from srv.specs import AttentionLayer

_ROTATED = (".q_proj.", ".k_proj.")
_LATENT_QUERIES, _LATENT_KEY = (".q_proj.", ".q_b_proj."), ".kv_a_proj_with_mqa."
_NORMS = (".q_norm.", ".k_norm.")  # of each head, whose weights have the order of the rows


class ArchitectureStorage(StorageFormat):
    """`layer`: the attention of the whole model's layers. `rotary_dim`: the interleaved dimensions per head, or 0."""

    def __init__(self, weights: StoredWeights, layer: AttentionLayer, rotary_dim: int, inner: StorageFormat) -> None:
        self._weights, self._inner, self._rotary_dim = weights, inner, rotary_dim
        self._heads, self._kv_heads, self._dim = layer.heads, layer.kv_heads, layer.head_dim
        self._latent = layer.latent

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
            rows = of_attention if len(parts) == len(of_attention) else [shape[0] // 2] * 2
            divided = len(parts) > 1 and shape[0] == sum(rows)  # otherwise the shape is reported
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
        """A weight or bias with rotary pairs half the rotated dimensions apart.

        The rotated dimensions are the first ones of a head. In latent attention they are the last ones of a query, and
        of the vector that is compressed.
        """
        if not self._rotary_dim:
            return rows
        if self._latent is None and any(each in name for each in _ROTATED):
            return self._reordered(rows, self._dim, 0)
        if self._latent is None and any(each in name for each in _NORMS):
            return self._reordered(rows.flatten(), self._dim, 0).view(rows.shape)
        if self._latent is None:
            return rows
        if any(each in name for each in _LATENT_QUERIES):
            return self._reordered(rows, self._dim, self._latent.key_dim)
        if _LATENT_KEY in name:
            return self._reordered(rows, self._latent.latent_dim + self._rotary_dim, self._latent.latent_dim)
        return rows

    def _reordered(self, rows: Tensor, dim: int, first: int) -> Tensor:
        """Rows of whole heads of `dim`, with the pairs of each that begin at `first` in another order."""
        half = torch.arange(first, first + self._rotary_dim, 2)
        end = first + self._rotary_dim
        order = torch.cat((torch.arange(first), half, half + 1, torch.arange(end, dim)))
        return rows.reshape(-1, dim, *rows.shape[1:])[:, order].reshape(rows.shape)
