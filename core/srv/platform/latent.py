"""The protocol of backends of multi-head latent attention, as far as it goes beyond `AttentionBackend`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from srv.platform.interface import AttentionBackend
from srv.specs import AttentionLayer


@runtime_checkable
class LatentAttentionBackend(AttentionBackend, Protocol):
    """An attention backend of a `Latent` cache group: multi-head latent attention, named by `BackendSpec.latent`.

    `forward` gets q [tokens, heads, key_dim + rope_dim], whose last `rope_dim` elements are rotated, as k the
    compressed vectors [tokens, 1, latent_dim], and as v the rotated keys that all heads share [tokens, 1, rope_dim]
    (`srv.specs.LatentDims`). In a layer with an indexer of its own (`AttentionLayer.indexer`), the index key, the index
    queries of all heads and their weights follow the compressed vector in k (`IndexDims.operands`), and the index key
    is written to the "index" tensor of the layer. Its choice serves the layers after it that have none, within a step.
    It writes both into the pool, attends, and returns [tokens, heads, value_dim]. It may
    compute the keys and values of the heads (materialised), or multiply queries and results by the up-projection
    instead, and attend over the compressed vectors (absorbed).
    """

    def prepare(self, layer: AttentionLayer, up: torch.Tensor) -> None:
        """Receive the up-projection of a layer: [heads, key_dim + value_dim, latent_dim] of the model's dtype.

        Head h has the key up[h, :key_dim] @ c of a compressed vector c, and the value up[h, key_dim:] @ c. Called for
        each layer before the first `plan`, and again whenever the weights change; what is derived from them keeps its
        address, because captured steps read it. The tensor stays where it is, and may be read later.
        """
