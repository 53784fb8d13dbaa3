"""Attention with Triton's kernels (`srv_kernels.triton.attention`), over pages of any size.

Rows with one query token go to `paged_decode`, which divides a row's keys among programs, the others to `paged_extend`;
a mixed step launches both over the same tensors. Lengths are read on the device. The launch sizes follow from the shape
of the step, so that a captured launch serves every step of its shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv_gpu import triton_ops
from srv_gpu.platform import hardware_of
from srv_gpu.step import Step, StepPlanner
from srv_kernels.triton.attention_plan import DecodePlan, Heads, extend_blocks, plan_decode

_DECODE_QUERIES = 1  # query tokens of a row that `paged_decode` computes
_KEPT_PLANS = 4096  # launch sizes that are kept: the layers of a step share them


class TritonAttention:
    """The "triton" attention backend. Implements `srv.platform.interface.AttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend triton needs a KV pool, but none was allocated")
        hardware = hardware_of(context)
        self._target = hardware.triton_target
        self._compute_units = hardware.accelerator.compute_units(context.device)
        self._keys, self._values = context.kv.keys, context.kv.values
        group = context.kv.layout.group
        self._value_dim: int = group.value_dim
        self._planner = StepPlanner(context.kv.layout.page_size, context.device, context.transfers)
        self._decode_plans: dict[tuple[Heads, int, int], DecodePlan] = {}

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        return "; ".join(self._heads(layer, item_size=2).reasons()) or None

    def _heads(self, layer: AttentionLayer, item_size: int) -> Heads:
        return Heads(layer.heads, layer.kv_heads, layer.head_dim, self._value_dim, item_size)

    def plan(self, batch: AttentionBatch) -> Step:
        """See `srv.platform.interface.AttentionBackend`."""
        return self._planner.plan(batch)

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: Step) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        keys, values = self._keys[layer.index], self._values[layer.index]
        triton_ops.write_kv(k, v, keys, values, metadata.slots)
        out = q.new_empty(q.shape[0], layer.heads, self._value_dim)
        heads = self._heads(layer, q.element_size())
        tensors = (q, keys, values, metadata.page_table, metadata.starts, metadata.lengths, out)
        scores = (layer.scale, layer.window, layer.soft_cap, None, None)
        if min(metadata.query_lens) <= _DECODE_QUERIES:
            self._decode(metadata, heads, tensors, scores)
        if max(metadata.query_lens) > _DECODE_QUERIES:
            blocks = list(extend_blocks(heads, self._target))
            triton_ops.paged_extend(*tensors, *scores, blocks, min_queries=_DECODE_QUERIES + 1)
        return out

    def _decode(
        self,
        step: Step,
        heads: Heads,
        tensors: tuple[Tensor, ...],
        scores: tuple[float, int | None, float | None, None, None],
    ) -> None:
        rows, window = len(step.query_lens), scores[1]
        longest = step.longest if window is None else min(step.longest, window)
        plan = self._decode_plan(heads, rows, longest)
        shape = plan.partial_shape(rows, heads)
        query = tensors[0]
        partial = query.new_empty(shape, dtype=torch.float32)
        logs = query.new_empty(shape[:-1], dtype=torch.float32)
        sizes = [plan.queries, plan.splits, plan.least_blocks]
        triton_ops.paged_decode(*tensors, *scores, list(plan.blocks), partial, logs, sizes)

    def _decode_plan(self, heads: Heads, rows: int, longest: int) -> DecodePlan:
        key = (heads, rows, longest)
        plan = self._decode_plans.get(key)
        if plan is None:
            if len(self._decode_plans) >= _KEPT_PLANS:
                self._decode_plans.clear()
            plan = plan_decode(heads, rows, _DECODE_QUERIES, longest, self._target, self._compute_units)
            self._decode_plans[key] = plan
        return plan
