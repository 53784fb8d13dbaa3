"""Multi-head latent attention with Triton's kernels, over pages of any size.

    absorbed        `srv_kernels.triton.latent_attention`. PyTorch multiplies queries and results by the up-projection,
                    and the kernel attends to compressed vectors. Where every such row has one query, their keys are
                    divided; the launch follows from the shape alone, so that a captured one serves every step of it
    materialised    `srv_kernels.triton.latent_prefill`. PyTorch computes the keys and values of each head: of the rows'
                    own tokens, and of what they have in the cache in parts (`srv_gpu.latent_prefill`)

Rows with many query tokens are materialised, unless the user says otherwise: see `fewest_materialised`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv.specs import LATENT, LatentDims
from srv_gpu import triton_ops
from srv_gpu.facts import ABSORB_PREFILL, NUM_KV_SPLITS, TRITON, WHOLE_PREFIX
from srv_gpu.latent_prefill import PART, Ints, LongRows, PrefillPlanner, fewest_materialised, tokens_of
from srv_gpu.platform import hardware_of
from srv_gpu.step import Step, StepPlanner, gather
from srv_kernels.triton.attention_tuning import MOST_SPLITS
from srv_kernels.triton.latent_attention import LARGEST, LatentSizes, latent_splits, launch_sizes
from srv_kernels.triton.latent_prefill import LARGEST_HEAD, prefill_sizes


@dataclass(frozen=True, slots=True)
class _ShortRows:
    """The absorbed rows of a step, and their launch. tokens: int64, the indices of their tokens in the step; None if it
    has no others.

    `queries`: the most query tokens of a row, rounded up to a power of two. `workspace`: [rows * queries, heads,
    splits], the results of splits; [1, 1, 1] without any.
    """

    tokens: Tensor | None
    page_table: Tensor
    starts: Tensor
    lengths: Tensor
    queries: int
    splits: int
    sizes: LatentSizes
    workspace: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step. slots: as in `Step`."""

    slots: Tensor
    short: _ShortRows | None
    long: LongRows | None = None


@dataclass(frozen=True, slots=True)
class _Up:
    """Views of a layer's up-projection: key [heads, key_dim, latent_dim], value [heads, latent_dim, value_dim], and
    both, [heads * (key_dim + value_dim), latent_dim]."""

    key: Tensor
    value: Tensor
    both: Tensor


class TritonLatentAttention:
    """The backend of latent attention of "triton". Implements `srv.platform.latent.LatentAttentionBackend`."""

    kv_writer = TRITON

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend triton needs a KV pool, but none was allocated")
        self._compute_units = hardware_of(context).accelerator.compute_units(context.device)
        self._most_splits = context.arguments.get(NUM_KV_SPLITS) or MOST_SPLITS
        self._latents, self._ropes = context.kv.tensors["latent"], context.kv.tensors["rope"]
        self._transfers = context.transfers
        self._planner = StepPlanner(context.kv.layout.page_size, context.device, context.transfers)
        self._target = hardware_of(context).triton_target
        self._absorb_all = bool(context.arguments.get(ABSORB_PREFILL))
        self._part = None if context.arguments.get(WHOLE_PREFIX) else PART
        self._up: dict[int, _Up] = {}
        self._heads, self._item_size = 0, 0  # of all layers, as `prepare` finds them
        self._fewest: int | None = None  # query tokens of a row that is materialised; None: no row is

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        if layer.latent is not None:
            for what, size in (("compressed vectors", layer.latent.latent_dim), ("rotary keys", layer.latent.rope_dim)):
                if size > LARGEST:
                    return f"{what} have {size} elements, more than {LARGEST}"
        return missing_traits((LATENT,), layer)

    def prepare(self, layer: AttentionLayer, up: Tensor) -> None:
        """See `srv.platform.latent.LatentAttentionBackend`. All parts are views of a contiguous tensor."""
        dims = _dims(layer)
        key, value = up.split_with_sizes([dims.key_dim, dims.value_dim], 1)
        self._up[layer.index] = _Up(key, value.transpose(1, 2), up.flatten(0, 1))
        self._heads, self._item_size = len(up), up.element_size()
        largest = max(dims.key_dim, dims.rope_dim, dims.value_dim)
        self._prefill_sizes = prefill_sizes(self._target, largest, self._item_size)
        self._prefill = PrefillPlanner(self._planner, self._transfers, self._prefill_sizes.rows, self._part)
        materialises = not self._absorb_all and largest <= LARGEST_HEAD
        self._fewest = fewest_materialised(dims) if materialises else None

    # Planning, once per step

    def plan(self, batch: AttentionBatch) -> _Planned:
        """See `srv.platform.interface.AttentionBackend`."""
        step, queries = self._planner.plan(batch), np.asarray(batch.query_lens, dtype=np.int64)
        if self._fewest is None or queries.max() < self._fewest:
            tensors = step.page_table, step.starts, step.lengths
            return _Planned(step.slots, self._short(None, *tensors, batch.query_lens, step.longest))
        long = self._prefill.plan(step, batch.kv_lens, np.flatnonzero(queries >= self._fewest))
        rows = np.flatnonzero(queries < self._fewest)
        return _Planned(step.slots, self._some(step, batch.kv_lens, rows) if len(rows) else None, long)

    def _some(self, step: Step, kv_lens: Sequence[int], rows: Ints) -> _ShortRows:
        """Some rows of a step that has others."""
        queries = np.asarray(step.query_lens, dtype=np.int64)[rows]
        upload = self._transfers.upload
        at, tokens = upload(rows), upload(tokens_of(step.query_lens, rows))
        starts = upload(np.concatenate(([0], np.cumsum(queries))).astype(np.int32))
        tensors = step.page_table.index_select(0, at), starts, step.lengths.index_select(0, at)
        return self._short(tokens, *tensors, queries.tolist(), max(kv_lens[row] for row in rows.tolist()))

    def _short(
        self,
        tokens: Tensor | None,
        page_table: Tensor,
        starts: Tensor,
        lengths: Tensor,
        query_lens: Sequence[int],
        longest: int,
    ) -> _ShortRows:
        rows = len(query_lens)
        # A power of two, since each number of queries of a grid would be another shape of a workspace.
        queries = 1 << (max(query_lens) - 1).bit_length()
        sizes = launch_sizes(queries, self._latents[0].shape[-1], self._item_size)
        units, most = self._compute_units, self._most_splits
        splits = latent_splits(rows, queries, self._heads, longest, units, sizes, most)
        workspace = (rows * queries, self._heads, splits) if splits > 1 else (1, 1, 1)
        return _ShortRows(tokens, page_table, starts, lengths, queries, splits, sizes, workspace)

    # Attention, once per layer

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: _Planned) -> Tensor:
        """See `srv.platform.latent.LatentAttentionBackend`."""
        latents, ropes = self._latents[layer.index], self._ropes[layer.index]
        triton_ops.write_kv(k, v, latents.unsqueeze(2), ropes.unsqueeze(2), metadata.slots)
        short, long = metadata.short, metadata.long
        if long is None:
            assert short is not None
            return self._absorbed(layer, q, short)
        attended = self._materialised(layer, q, k[:, 0], v[:, 0], long)
        if short is None or short.tokens is None or long.tokens is None:
            return attended
        out = q.new_empty(q.shape[0], layer.heads, _dims(layer).value_dim)
        out.index_copy_(0, long.tokens, attended)
        return out.index_copy_(0, short.tokens, self._absorbed(layer, q.index_select(0, short.tokens), short))

    def _absorbed(self, layer: AttentionLayer, q: Tensor, rows: _ShortRows) -> Tensor:
        """[tokens, heads, value_dim]."""
        dims, up = _dims(layer), self._up[layer.index]
        plain, rotated = q.split_with_sizes([dims.key_dim, dims.rope_dim], -1)
        absorbed = torch.bmm(plain.transpose(0, 1), up.key).transpose(0, 1)  # [tokens, heads, latent_dim]
        partial = q.new_empty((*rows.workspace, dims.latent_dim), dtype=torch.float32)
        logs = q.new_empty(rows.workspace, dtype=torch.float32)
        attended = q.new_empty(q.shape[0], layer.heads, dims.latent_dim)
        triton_ops.paged_latent(
            absorbed,
            rotated,
            self._latents[layer.index],
            self._ropes[layer.index],
            rows.page_table,
            rows.starts,
            rows.lengths,
            attended,
            layer.scale,
            rows.queries,
            rows.splits,
            list(rows.sizes),
            partial,
            logs,
        )
        return torch.bmm(attended.transpose(0, 1), up.value).transpose(0, 1)

    def _materialised(self, layer: AttentionLayer, q: Tensor, latent: Tensor, rope: Tensor, rows: LongRows) -> Tensor:
        """[tokens, heads, value_dim]; latent [tokens, latent_dim] and rope [tokens, rope_dim] are of the whole step."""
        if rows.tokens is not None:
            q, latent, rope = (tensor.index_select(0, rows.tokens) for tensor in (q, latent, rope))
        several = len(rows.parts) > 1
        dtype = torch.float32 if several else q.dtype
        out = q.new_empty(q.shape[0], layer.heads, _dims(layer).value_dim, dtype=dtype)
        logs = q.new_empty(q.shape[0], layer.heads, dtype=torch.float32) if several else None
        pools = [pool[layer.index].flatten(0, 1) for pool in (self._latents, self._ropes)]
        for part in rows.parts:
            if part.slots is not None:
                latent, rope = (gather(pool, part.slots).to(q.dtype) for pool in pools)
            heads = F.linear(latent, self._up[layer.index].both).view(len(latent), layer.heads, -1)
            is_own, sizes = part.slots is None, list(self._prefill_sizes)
            triton_ops.latent_prefill(q, heads, rope, part.segments, part.tiles, out, logs, layer.scale, is_own, sizes)
        return out.to(q.dtype)


def _dims(layer: AttentionLayer) -> LatentDims:
    if layer.latent is None:
        raise InternalError("attention backend triton got a layer without latent attention")
    return layer.latent
