"""The sizes of a layer with the gated delta rule, as data. Torch-free: `srv plan` reads them."""

from __future__ import annotations

from typing import NamedTuple


class DeltaSizes(NamedTuple):
    """Heads of queries and keys, heads of values, and the sizes of both; `width`: tokens that the convolution reads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Those of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values
