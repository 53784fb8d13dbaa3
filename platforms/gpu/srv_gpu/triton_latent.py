"""Multi-head latent attention with Triton's kernel (`srv_kernels.triton.latent_attention`), over pages of any size.

All rows are absorbed: PyTorch multiplies queries and results by the up-projection, and the kernel attends to compressed
vectors. A step in which every row has one query is divided along its keys; its launch follows from its shape alone, so
that a captured launch serves every step of the shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv.specs import LATENT
from srv_gpu import triton_ops
from srv_gpu.facts import NUM_KV_SPLITS, TRITON
from srv_gpu.platform import hardware_of
from srv_gpu.step import Step, StepPlanner
from srv_kernels.triton.attention_tuning import MOST_SPLITS
from srv_kernels.triton.latent_attention import LARGEST, LatentSizes, latent_splits, launch_sizes


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step and its launch. `queries`: the most query tokens of its rows, rounded up to a power of two.

    `workspace`: [rows * queries, heads, splits], the results of splits; [1, 1, 1] without any.
    """

    step: Step
    queries: int
    splits: int
    sizes: LatentSizes
    workspace: tuple[int, int, int]


class TritonLatentAttention:
    """The backend of latent attention of "triton". Implements `srv.platform.latent.LatentAttentionBackend`."""

    kv_writer = TRITON

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend triton needs a KV pool, but none was allocated")
        self._compute_units = hardware_of(context).accelerator.compute_units(context.device)
        self._most_splits = context.arguments.get(NUM_KV_SPLITS) or MOST_SPLITS
        self._latents, self._ropes = context.kv.tensors["latent"], context.kv.tensors["rope"]
        self._planner = StepPlanner(context.kv.layout.page_size, context.device, context.transfers)
        self._up: dict[int, tuple[Tensor, Tensor]] = {}
        self._heads, self._item_size = 0, 0  # of all layers, as `prepare` finds them

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        if layer.latent is not None:
            for what, size in (("compressed vectors", layer.latent.latent_dim), ("rotary keys", layer.latent.rope_dim)):
                if size > LARGEST:
                    return f"{what} have {size} elements, more than {LARGEST}"
        return missing_traits((LATENT,), layer)

    def prepare(self, layer: AttentionLayer, up: Tensor) -> None:
        """See `srv.platform.latent.LatentAttentionBackend`. Both parts are views."""
        if layer.latent is None:
            raise InternalError("attention backend triton got an up-projection for a layer without latent attention")
        key, value = up.split([layer.latent.key_dim, layer.latent.value_dim], 1)
        self._up[layer.index] = key, value.transpose(1, 2)
        self._heads, self._item_size = len(up), up.element_size()

    def plan(self, batch: AttentionBatch) -> _Planned:
        """See `srv.platform.interface.AttentionBackend`."""
        step, rows = self._planner.plan(batch), len(batch.query_lens)
        # A power of two, since each number of queries of a grid would be another shape of a workspace.
        queries = 1 << (max(batch.query_lens) - 1).bit_length()
        sizes = launch_sizes(queries, self._latents[0].shape[-1], self._item_size)
        units, most = self._compute_units, self._most_splits
        splits = latent_splits(rows, queries, self._heads, step.longest, units, sizes, most)
        workspace = (rows * queries, self._heads, splits) if splits > 1 else (1, 1, 1)
        return _Planned(step, queries, splits, sizes, workspace)

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: _Planned) -> Tensor:
        """See `srv.platform.latent.LatentAttentionBackend`."""
        dims, step = layer.latent, metadata.step
        assert dims is not None
        latents, ropes = self._latents[layer.index], self._ropes[layer.index]
        triton_ops.write_kv(k, v, latents.unsqueeze(2), ropes.unsqueeze(2), step.slots)
        key, value = self._up[layer.index]
        plain, rotated = q.split([dims.key_dim, dims.rope_dim], -1)
        absorbed = torch.bmm(plain.transpose(0, 1), key).transpose(0, 1)  # [tokens, heads, latent_dim]
        partial = q.new_empty((*metadata.workspace, dims.latent_dim), dtype=torch.float32)
        logs = q.new_empty(metadata.workspace, dtype=torch.float32)
        found = q.new_empty(q.shape[0], layer.heads, dims.latent_dim)
        triton_ops.paged_latent(
            absorbed,
            rotated,
            latents,
            ropes,
            step.page_table,
            step.starts,
            step.lengths,
            found,
            layer.scale,
            metadata.queries,
            metadata.splits,
            list(metadata.sizes),
            partial,
            logs,
        )
        return torch.bmm(found.transpose(0, 1), value).transpose(0, 1)
