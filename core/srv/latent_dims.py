"""The sizes of multi-head latent attention, and of the indexer that chooses its keys. Torch-free, for `srv.specs`."""

from __future__ import annotations

from typing import NamedTuple


class LatentDims(NamedTuple):
    """The sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    A head's key has `key_dim` elements that follow from the compressed vector of `latent_dim`, and `rope_dim` rotated
    ones that all heads share; its value has `value_dim`, which follow from the compressed vector as well.
    """

    latent_dim: int
    key_dim: int
    rope_dim: int
    value_dim: int


class IndexDims(NamedTuple):
    """The indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556), which chooses the keys of a query.

    It has `heads` queries per token, and one key, of `dim` elements. The score of a key is the sum over heads of
    weight / sqrt(heads) * relu(q.k / sqrt(dim)), in float32, with weights that follow from the query's token. A query
    attends to the `top_k` keys with the largest scores among those that it sees, of equal ones to the earliest, or to
    all if it sees no more. `own`: whether the layer has an indexer; if not, it attends to the keys that the last
    layer with one has chosen.
    """

    heads: int
    dim: int
    top_k: int
    own: bool = True

    @property
    def operands(self) -> tuple[int, int, int]:
        """The elements of a token's index key, queries and weights, which follow its compressed vector in `attend`."""
        return (self.dim, self.heads * self.dim, self.heads) if self.own else (0, 0, 0)
