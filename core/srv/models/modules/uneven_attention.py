"""Attention whose values have another size than keys, with a projection of their own (MiMo-V2-Flash)."""

from __future__ import annotations

from torch import Tensor

from srv.models.blueprint.uneven import UnevenAttention as UnevenPart
from srv.models.modules.attention import Attention
from srv.models.modules.place import Place


class UnevenAttention(Attention):
    """The products with `qkv_proj` are queries and keys."""

    def __init__(self, part: UnevenPart, place: Place) -> None:
        super().__init__(part, place)
        self.v_proj = place.linear(part.values)
        *self.head_counts, self._value_heads = self.head_counts
        self.total_heads = sum(self.head_counts)
        self._value_factor = part.value_factor

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (
            self.qkv_proj.kernel(x)
            .view(-1, self.total_heads, self.layer.head_dim)
            .split_with_sizes(self.head_counts, 1)
        )
        v = self.v_proj.kernel(x).view(len(x), self._value_heads, -1)
        return q, k, v * self._value_factor
