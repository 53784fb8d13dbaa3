"""Multi-head latent attention with torch operators, over the paged pool of compressed vectors and rotary keys.

Owns the two ways to compute it (DeepSeek-V2, arXiv:2405.04434); which slots of the pool a step reads is planned as for
other attention.

    absorbed        q' = [q · up_key, q_rope]   attends over   [c, rope]   in the pool, values c; then · up_value
    materialised    q  = [q, q_rope]            attends over   [c · up_key, rope] of each head, values c · up_value

Each row takes the way with fewer products: for few queries (DeepSeek: up to 170), computing the keys and values of each
head costs more than attending to longer vectors; for many, these take a third of the products. Keys are materialised
once, in chunks whose results are merged (online softmax), so that memory does not grow with the prefix in the cache.

With an indexer (`srv_cpu.chosen_keys`), a row with one query reads only the chosen keys, and in longer rows all others
are hidden from a query.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext, KVBuffers
from srv.platform.layers import missing_traits
from srv.specs import LATENT, LatentDims
from srv_cpu.chosen_keys import Choice, IndexOperands, choose
from srv_cpu.host import threads
from srv_cpu.latent_forms import ABSORB_PREFILL, PART, WHOLE_PREFIX, fewest_by_products
from srv_cpu.reach import ALL
from srv_cpu.step_plan import ReadPlan, StepPlan, StepPlanner

_QUERIES = 256  # queries whose scores exist at the same time
_LEAST = torch.finfo(torch.float32).min


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
        self._chunk = None if context.arguments.get(WHOLE_PREFIX) else PART
        self._up: dict[int, Tensor] = {}
        self._indexes = _index_pools(context.kv)
        self._choice: tuple[StepPlan, Choice] | None = None  # of the last indexer, for layers without one
        torch.set_num_threads(threads())  # with native linear layers torch has one thread: see `post_load`

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        return missing_traits((LATENT, "indexer", "sinks"), layer)

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
        k, joined = k[:, 0].split_with_sizes([dims.latent_dim, k.shape[-1] - dims.latent_dim], 1)
        latents.index_copy_(0, metadata.written, k.to(self._dtype))
        ropes.index_copy_(0, metadata.written, v[:, 0].to(self._dtype))
        read_plan = self._planner.read_plan(metadata, ALL)
        choice = self._chosen(layer, joined, metadata, read_plan)
        out = q.new_empty(q.shape[0], layer.heads, dims.value_dim)
        for group, few in zip(read_plan.decode, choice.decode, strict=True):
            slots, hidden = (group.slots.indices, group.mask) if few is None else (few.slots.flatten(), few.mask)
            key = torch.cat((latents[slots], ropes[slots]), -1).view(group.rows, 1, len(slots) // group.rows, -1)
            key = key.to(q.dtype)
            query = q if group.tokens is None else q[group.tokens]
            absorbed = _absorbed(query, up, dims).unsqueeze(2)  # [rows, heads, 1, latent + rope]
            mask = None if hidden is None else hidden.to(q.dtype)
            attended = _attended(layer, absorbed, key, key[..., : dims.latent_dim], mask)
            result = _expanded(attended.squeeze(2), up, dims)
            if group.tokens is None:
                out = result
            else:
                out[group.tokens] = result
        for row, chosen in zip(read_plan.extend, choice.extend, strict=True):
            tokens = slice(row.begin, row.end)
            latent, rope = (k[tokens], v[tokens, 0]) if row.slots is None else (
                latents[row.slots.indices].to(q.dtype), ropes[row.slots.indices].to(q.dtype)
            )  # fmt: skip
            out[tokens] = self._extend(layer, dims, q[tokens], latent, rope, up, chosen)
        return out

    def _chosen(self, layer: AttentionLayer, joined: Tensor, metadata: StepPlan, read_plan: ReadPlan) -> Choice:
        """The keys that each query of the step reads; `joined`: the operands of the layer's indexer."""
        dims = layer.indexer
        if dims is None:
            return Choice((None,) * len(read_plan.decode), (None,) * len(read_plan.extend))
        if dims.own:
            operands, pool = IndexOperands.of(joined, dims), self._indexes[layer.index]
            pool.index_copy_(0, metadata.written, operands.keys.to(self._dtype))
            self._choice = metadata, choose(read_plan, operands, pool, dims)
        if self._choice is None or self._choice[0] is not metadata:
            raise InternalError("a layer without an indexer was computed before the layer that chooses its keys")
        return self._choice[1]

    def _extend(
        self,
        layer: AttentionLayer,
        dims: LatentDims,
        q: Tensor,
        latent: Tensor,
        rope: Tensor,
        up: Tensor,
        chosen: Tensor | None,
    ) -> Tensor:
        """The last tokens q [Q, heads, D] of a row over its keys, latent [K, latent_dim] and rope [K, rope_dim].

        `chosen`: the keys that each query reads, bool [Q, K]; None for all before it. Chunks of keys are
        merged in float32: `top` is the largest score so far, `total` the sum of weights.
        """
        queries, keys = len(q), len(latent)
        absorb = self._absorb_all or _absorbs(queries, dims)
        query = (_absorbed(q, up, dims) if absorb else q).transpose(0, 1)  # [heads, Q, D]
        sinks = _sinks(layer)
        top = torch.full((layer.heads, queries, 1), float("-inf")) if sinks is None else sinks.repeat(1, queries, 1)
        total = torch.full_like(top, 0.0 if sinks is None else 1.0)  # a sink has its weight, and no value
        weighted = torch.zeros(layer.heads, queries, dims.latent_dim if absorb else dims.value_dim)
        chunk = self._chunk or keys
        for begin in range(0, keys, chunk):
            part = slice(begin, begin + chunk)
            key, value = _operands(latent[part], rope[part], up, dims, absorb)
            for first in range(0, queries, _QUERIES):
                block = slice(first, min(first + _QUERIES, queries))
                position = keys - queries + torch.arange(block.start, block.stop)
                visible = min(chunk, keys - queries + block.stop - begin)  # keys of the chunk up to the last query's
                if visible <= 0:
                    continue
                scores = (query[:, block] @ key[..., :visible, :].transpose(-1, -2)).float() * layer.scale
                if begin + visible > keys - queries + block.start:
                    scores.masked_fill_(torch.arange(begin, begin + visible) > position[:, None], float("-inf"))
                if chosen is not None:
                    scores.masked_fill_(~chosen[block, begin : begin + visible], float("-inf"))
                higher = torch.maximum(top[:, block], scores.amax(-1, keepdim=True))
                base = higher if chosen is None else higher.clamp(min=_LEAST)  # a query may have no key in a chunk
                weights, factor = (scores - base).exp_(), (top[:, block] - base).exp_()
                total[:, block] = total[:, block] * factor + weights.sum(-1, keepdim=True)
                results = (weights.to(q.dtype) @ value[..., :visible, :]).float()
                weighted[:, block] = weighted[:, block] * factor + results
                top[:, block] = higher
        attended = (weighted / total).to(q.dtype).transpose(0, 1)
        return _expanded(attended, up, dims) if absorb else attended


def _index_pools(kv: KVBuffers) -> dict[int, Tensor]:
    """The index keys [slots, dim] of each layer that has an indexer, by its index in the group."""
    place = {layer: index for index, layer in enumerate(kv.layout.group.layers)}
    pools = zip(kv.layout.layers_of("index"), kv.tensors.get("index", ()), strict=False)
    return {place[layer]: buffer.flatten(0, 1) for layer, buffer in pools}


def _sinks(layer: AttentionLayer) -> Tensor | None:
    """The scores of sinks, float32 [heads, 1, 1]; None without them."""
    return torch.tensor(layer.sink_scores).view(-1, 1, 1) if layer.sink_scores is not None else None


def _attended(layer: AttentionLayer, q: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Absorbed queries [rows, heads, 1, D] over keys [rows, 1, K, D], values [rows, 1, K, V] -> [rows, heads, 1, V]."""
    sinks = _sinks(layer)
    if sinks is None:
        shape = (-1, layer.heads, -1, -1)
        return F.scaled_dot_product_attention(q, key.expand(shape), value.expand(shape), mask, scale=layer.scale)
    scores = (q @ key.transpose(-1, -2)).float().mul_(layer.scale)
    if mask is not None:
        scores += mask
    scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
    return scores.to(q.dtype) @ value


def _absorbs(queries: int, dims: LatentDims) -> bool:
    """Whether absorbing takes fewer products per key and head than computing its key and value."""
    fewest = fewest_by_products(dims)
    return fewest is None or queries < fewest


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


def _expanded(attended: Tensor, up: Tensor, dims: LatentDims) -> Tensor:
    """Weighted compressed vectors [T, heads, latent_dim] -> values [T, heads, value_dim]."""
    values = up[:, dims.key_dim :].transpose(1, 2)  # [heads, latent_dim, value_dim]
    return torch.matmul(attended.transpose(0, 1), values).transpose(0, 1)
