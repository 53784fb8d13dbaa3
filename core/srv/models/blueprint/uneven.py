"""Attention whose values have another size than keys (MiMo-V2-Flash). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from srv.models.blueprint import Attention, Linear
from srv.specs import CacheSpec, FullAttention, SlidingWindow


@dataclass(frozen=True)
class UnevenAttention(Attention):
    """`qkv`: the projections to queries and keys alone. `values`: that to values, each of `value_dim` elements;
    `value_factor`: multiplies them.
    """

    values: Linear = field(kw_only=True)
    value_dim: int = field(kw_only=True)
    value_factor: float = field(kw_only=True)

    def cache(self, dtype: str) -> CacheSpec:
        if self.window is None:
            return FullAttention((), self.kv_heads, self.head_dim, self.value_dim)
        return SlidingWindow((), self.kv_heads, self.head_dim, self.value_dim, self.window)
