"""The indexer of sparse attention (DeepSeek-V3.2): the operands with which a backend chooses the keys of each query.

    compressed queries ── wq_b ─ rotary ──────────── queries ─┐
    hidden ─┬─ wk ─ layer norm ─ rotary ──────────── key ─────┼─ joined: [key, queries, weights] per token
            └─ weights_proj ──────────────────────── weights ─┘

Every rank computes all of it, because its choice is for all heads. The published code also multiplies queries and keys
by a Hadamard matrix, which does not change their products, and rounds them to 8 bits, which this does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from srv.models.blueprint import latent as latent_parts
from srv.models.blueprint.latent import Latent
from srv.models.modules.norms import make_norm
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs


class Indexer(nn.Module):
    """The indexer of one layer. `attention`: that for which it chooses keys."""

    def __init__(self, attention: Latent, part: latent_parts.Indexer, place: Place) -> None:
        super().__init__()
        context = place.context
        assert attention.index is not None
        self.dims = attention.index
        self._plain = self.dims.dim - part.rotated  # the first dimensions, which are not rotated
        self.q_proj, self.k_proj, self.weights_proj = map(place.linear, (part.queries, part.keys, part.scores))
        self.k_norm = make_norm(part.key_norm, place)
        rotated = {"head_dim": part.rotated, "rotary_dim": part.rotary_dim}
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = context.ops.bind("rotary", OpArgs(context.dtype, rotated))

    def forward(self, x: Tensor, queries: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """x [T, hidden], compressed queries [T, rank] -> `IndexDims.operands` [T, their sum]."""
        dims = self.dims
        q = self.q_proj.kernel(queries).view(-1, dims.heads, dims.dim)
        k = self.k_norm.forward(self.k_proj.kernel(x)).unsqueeze(1)
        if self._plain:
            q, k = self._last_rotated(q, k, positions, cos_sin)
        else:
            q, k = self._rotary(q, k, cos_sin, positions)
        return torch.cat((k.flatten(1), q.flatten(1), self.weights_proj.kernel(x)), 1)

    def _last_rotated(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated = self._rotary(q[..., self._plain :], k[..., self._plain :], cos_sin, positions)
        plain = q[..., : self._plain], k[..., : self._plain]
        return torch.cat((plain[0], rotated[0]), -1), torch.cat((plain[1], rotated[1]), -1)
