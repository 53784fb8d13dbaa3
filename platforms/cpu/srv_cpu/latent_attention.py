"""Multi-head latent attention with torch operators, over the paged pool of compressed vectors and rotary keys.

Owns the two ways to compute it (DeepSeek-V2, arXiv:2405.04434); which slots of the pool a step reads is planned as for
other attention.

    absorbed        q' = [q · up_key, q_rope]   attends over   [c, rope]   in the pool, values c; then · up_value
    materialised    q  = [q, q_rope]            attends over   [c · up_key, rope] of each head, values c · up_value

Each row takes the way with fewer products: for few queries (DeepSeek: up to 170), computing the keys and values of each
head costs more than attending to longer vectors; for many, these take a third of the products. Keys are materialised
once, in chunks whose results are merged (online softmax), so that memory does not grow with the prefix in the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv.specs import LATENT, LatentDims
from srv_cpu.facts import ABSORB_PREFILL, WHOLE_PREFIX
from srv_cpu.host import threads
from srv_cpu.reach import ALL
from srv_cpu.step_plan import StepPlan, StepPlanner

_CHUNK = 1024  # keys whose heads' keys and values exist at the same time
_QUERIES = 256  # queries whose scores exist at the same time


class TorchLatentAttention:
    """The backend of latent attention of "torch_native": any page size, head size and float dtype."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend torch_native was built without a KV pool; it needs one")
        tensors = context.kv.tensors
        self._latents = tuple(buffer.flatten(0, 1) for buffer in tensors["latent"])  # [slots, latent_dim]
        self._ropes = tuple(buffer.flatten(0, 1) for buffer in tensors["rope"])
        self._dtype = self._latents[0].dtype
        self._planner = StepPlanner(context.kv.layout.page_size, self._dtype)
        self._absorb_all = bool(context.arguments.get(ABSORB_PREFILL))
        self._chunk = None if context.arguments.get(WHOLE_PREFIX) else _CHUNK
        self._up: dict[int, Tensor] = {}
        torch.set_num_threads(threads())  # with native linear layers torch has one thread: see `post_load`

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        return missing_traits((LATENT,), layer)

    def prepare(self, layer: AttentionLayer, up: Tensor) -> None:
        """See `srv.platform.latent.LatentAttentionBackend`."""
        self._up[layer.index] = up

    def plan(self, batch: AttentionBatch) -> StepPlan:
        """See `srv.platform.interface.AttentionBackend`."""
        return self._planner.plan(batch)

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: StepPlan) -> Tensor:
        """See `srv.platform.latent.LatentAttentionBackend`."""
        dims, up = layer.latent, self._up[layer.index]
        assert dims is not None
        latents, ropes = self._latents[layer.index], self._ropes[layer.index]
        latents.index_copy_(0, metadata.written, k[:, 0].to(self._dtype))
        ropes.index_copy_(0, metadata.written, v[:, 0].to(self._dtype))
        read_plan = self._planner.read_plan(metadata, ALL)
        out = q.new_empty(q.shape[0], layer.heads, dims.value_dim)
        for group in read_plan.decode:
            shape = (group.rows, 1, group.longest, -1)
            key = torch.cat((latents[group.slots.indices], ropes[group.slots.indices]), -1).view(shape).to(q.dtype)
            query = q if group.tokens is None else q[group.tokens]
            absorbed = _absorbed(query, up, dims).unsqueeze(2)  # [rows, heads, 1, latent + rope]
            mask = None if group.mask is None else group.mask.to(q.dtype)
            value = key[..., : dims.latent_dim]
            found = F.scaled_dot_product_attention(
                absorbed, key.expand(-1, layer.heads, -1, -1), value.expand(-1, layer.heads, -1, -1), mask,
                scale=layer.scale,
            )  # fmt: skip
            result = _expanded(found.squeeze(2), up, dims)
            if group.tokens is None:
                out = result
            else:
                out[group.tokens] = result
        for row in read_plan.extend:
            own = slice(row.begin, row.end)
            latent, rope = (k[own, 0], v[own, 0]) if row.slots is None else (
                latents[row.slots.indices].to(q.dtype), ropes[row.slots.indices].to(q.dtype)
            )  # fmt: skip
            out[own] = self._extend(layer, dims, q[own], latent, rope, up)
        return out

    def _extend(
        self, layer: AttentionLayer, dims: LatentDims, q: Tensor, latent: Tensor, rope: Tensor, up: Tensor
    ) -> Tensor:
        """The last tokens q [Q, heads, D] of a row over its keys, latent [K, latent_dim] and rope [K, rope_dim].

        Chunks of keys are merged in float32: `top` is the largest score so far, `total` the sum of weights.
        """
        queries, keys = len(q), len(latent)
        absorb = self._absorb_all or _absorbs(queries, dims)
        query = (_absorbed(q, up, dims) if absorb else q).transpose(0, 1)  # [heads, Q, D]
        top = torch.full((layer.heads, queries, 1), float("-inf"))
        total = torch.zeros_like(top)
        weighted = torch.zeros(layer.heads, queries, dims.latent_dim if absorb else dims.value_dim)
        chunk = self._chunk or keys
        for begin in range(0, keys, chunk):
            part = slice(begin, begin + chunk)
            key, value = _operands(latent[part], rope[part], up, dims, absorb)
            for first in range(0, queries, _QUERIES):
                block = slice(first, min(first + _QUERIES, queries))
                position = keys - queries + torch.arange(block.start, block.stop)
                seen = min(chunk, keys - queries + block.stop - begin)  # keys of the chunk up to the last query's
                if seen <= 0:
                    continue
                scores = (query[:, block] @ key[..., :seen, :].transpose(-1, -2)).float() * layer.scale
                if begin + seen > keys - queries + block.start:
                    scores.masked_fill_(torch.arange(begin, begin + seen) > position[:, None], float("-inf"))
                higher = torch.maximum(top[:, block], scores.amax(-1, keepdim=True))
                weights, factor = (scores - higher).exp_(), (top[:, block] - higher).exp_()
                total[:, block] = total[:, block] * factor + weights.sum(-1, keepdim=True)
                results = (weights.to(q.dtype) @ value[..., :seen, :]).float()
                weighted[:, block] = weighted[:, block] * factor + results
                top[:, block] = higher
        found = (weighted / total).to(q.dtype).transpose(0, 1)
        return _expanded(found, up, dims) if absorb else found


def _absorbs(queries: int, dims: LatentDims) -> bool:
    """Whether absorbing takes fewer products per key and head than computing its key and value."""
    own = dims.key_dim + dims.value_dim
    return queries * (2 * dims.latent_dim - own) < dims.latent_dim * own


def _operands(latent: Tensor, rope: Tensor, up: Tensor, dims: LatentDims, absorb: bool) -> tuple[Tensor, Tensor]:
    """Keys and values of one chunk: of each head [heads, K, D], or absorbed, which all heads share [K, D]."""
    if absorb:
        return torch.cat((latent, rope), -1), latent
    heads = torch.matmul(latent, up.transpose(1, 2))  # [heads, K, key_dim + value_dim]
    key, value = heads.split([dims.key_dim, dims.value_dim], -1)
    return torch.cat((key, rope.expand(len(up), -1, -1)), -1), value


def _absorbed(q: Tensor, up: Tensor, dims: LatentDims) -> Tensor:
    """Queries [T, heads, key_dim + rope_dim] -> those for compressed keys, [T, heads, latent_dim + rope_dim]."""
    plain, rotated = q.split([dims.key_dim, dims.rope_dim], -1)
    return torch.cat((torch.matmul(plain.transpose(0, 1), up[:, : dims.key_dim]).transpose(0, 1), rotated), -1)


def _expanded(found: Tensor, up: Tensor, dims: LatentDims) -> Tensor:
    """Weighted compressed vectors [T, heads, latent_dim] -> values [T, heads, value_dim]."""
    values = up[:, dims.key_dim :].transpose(1, 2)  # [heads, latent_dim, value_dim]
    return torch.matmul(found.transpose(0, 1), values).transpose(0, 1)
