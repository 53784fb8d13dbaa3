"""Attention with Triton's kernels (`srv_kernels.triton.attention`), over pages of any size.

Rows with few query tokens (output, and drafts to verify) go to `paged_decode`, which divides a row's keys among
programs, the others to `paged_extend`; a mixed step launches both over the same tensors. Lengths are read on the
device. The launch sizes follow from the shape of the step, so that a captured launch serves every step of its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv.platform.pools import is_float8
from srv_gpu import triton_ops
from srv_gpu.facts import NUM_KV_SPLITS, SPLIT_TILE_SIZE, TRITON, TRITON_TRAITS
from srv_gpu.per_head import PerHead
from srv_gpu.platform import hardware_of
from srv_gpu.step import Step, StepPlanner
from srv_kernels.triton.attention_plan import DecodePlan, Heads, Splits, extend_blocks, plan_decode
from srv_kernels.triton.kv_write_int8 import views

DECODE_QUERIES = 8  # the most query tokens of a row that `paged_decode` computes
_KEPT_PLANS = 4096  # launch sizes that are kept: the layers of a step share them


@dataclass(frozen=True, slots=True)
class _Pool:
    """Keys and values of one layer [pages + 1, page_size, kv_heads, dim]; of int8 and 8-bit floats, their scales too.

    The scales are float32: [pages + 1, page_size, kv_heads] of int8, and [1] of 8-bit floats.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k and v [tokens, kv_heads, dim] at `slots` [tokens]."""
        if self.keys.dtype.is_floating_point:
            triton_ops.write_kv(k, v, self.keys, self.values, slots, self.key_scale, self.value_scale)
        else:
            triton_ops.write_kv_int8(k, v, self.keys, self.values, self.key_scale, self.value_scale, slots)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step, and who computes its rows: those of up to `queries` query tokens `paged_decode` (0: none), the others, if
    there are any (`extends`), `paged_extend`."""

    step: Step
    queries: int
    extends: bool


class TritonAttention:
    """The "triton" attention backend. Implements `srv.platform.interface.AttentionBackend`."""

    kv_writer = TRITON

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend triton needs a KV pool, but none was allocated")
        hardware = hardware_of(context)
        self._target = hardware.triton_target
        self._compute_units = hardware.accelerator.compute_units(context.device)
        layout, group = context.kv.layout, context.kv.layout.group
        self._value_dim: int = group.value_dim
        layers = zip(context.kv.keys, context.kv.values, strict=True)
        if layout.dtype == "int8":
            sizes = layout.page_size, group.kv_heads
            split = (
                (views(keys, *sizes, group.key_dim), views(values, *sizes, group.value_dim)) for keys, values in layers
            )
            self._pools = tuple(_Pool(keys[0], values[0], keys[1], values[1]) for keys, values in split)
        elif is_float8(layout.dtype):
            pools = []
            for index, (keys, values) in enumerate(layers):
                scales = np.array(context.kv.scales(index), np.float32)
                key_scale, value_scale = context.transfers.upload(scales).split(1)
                pools.append(_Pool(keys, values, key_scale, value_scale))
            self._pools = tuple(pools)
        else:
            self._pools = tuple(_Pool(keys, values) for keys, values in layers)
        self._sinks = PerHead(context.transfers)
        arguments = context.arguments
        self._splits = Splits(arguments.get(NUM_KV_SPLITS), arguments.get(SPLIT_TILE_SIZE))
        self._planner = StepPlanner(layout.page_size, context.device, context.transfers)
        self._decode_plans: dict[tuple[Heads, int, int, int], DecodePlan] = {}

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        return "; ".join(self._heads(layer, item_size=2).reasons()) or missing_traits(TRITON_TRAITS, layer)

    def _heads(self, layer: AttentionLayer, item_size: int) -> Heads:
        return Heads(layer.heads, layer.kv_heads, layer.head_dim, self._value_dim, item_size)

    def plan(self, batch: AttentionBatch) -> _Planned:
        """See `srv.platform.interface.AttentionBackend`."""
        queries = decode_queries(batch.query_lens)
        return _Planned(self._planner.plan(batch), queries, max(batch.query_lens) > queries)

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: _Planned) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        pool, step, queries = self._pools[layer.index], metadata.step, metadata.queries
        pool.write(k, v, step.slots)
        out = q.new_empty(q.shape[0], layer.heads, self._value_dim)
        heads = self._heads(layer, q.element_size())
        tensors = (q, pool.keys, pool.values, step.page_table, step.starts, step.lengths, out)
        sinks = self._sinks.upload(layer.sink_scores)
        reach = (layer.window, layer.chunk)
        capped = (layer.soft_cap, layer.temperature_from)
        scores = (layer.scale, *reach, *capped, sinks, pool.key_scale, pool.value_scale)
        if queries:
            longest = min((step.longest, *(most for most in reach if most is not None)))
            self._decode(step, heads, queries, longest, tensors, scores)
        if metadata.extends:
            blocks = list(extend_blocks(heads, self._target))
            triton_ops.paged_extend(*tensors, *scores, blocks, min_queries=queries + 1)
        return out

    def _decode(
        self,
        step: Step,
        heads: Heads,
        queries: int,
        longest: int,
        tensors: tuple[Tensor, ...],
        scores: tuple[float | Tensor | None, ...],
    ) -> None:
        rows = len(step.query_lens)
        plan = self._decode_plan(heads, rows, queries, longest)
        shape = plan.partial_shape(rows, heads)
        query = tensors[0]
        partial = query.new_empty(shape, dtype=torch.float32)
        logs = query.new_empty(shape[:-1], dtype=torch.float32)
        sizes = [plan.queries, plan.splits, plan.least_blocks]
        triton_ops.paged_decode(*tensors, *scores, list(plan.blocks), partial, logs, sizes)

    def _decode_plan(self, heads: Heads, rows: int, queries: int, longest: int) -> DecodePlan:
        key = (heads, rows, queries, longest)
        plan = self._decode_plans.get(key)
        if plan is None:
            if len(self._decode_plans) >= _KEPT_PLANS:
                self._decode_plans.clear()
            plan = plan_decode(heads, rows, queries, longest, self._target, self._compute_units, self._splits)
            self._decode_plans[key] = plan
        return plan


def decode_queries(query_lens: Sequence[int]) -> int:
    """The most query tokens of the rows that go to `paged_decode`, rounded up to 1, 2, 4 or 8; 0 if none goes there.

    Few numbers, since each is another kernel to compile.
    """
    most = max((queries for queries in query_lens if queries <= DECODE_QUERIES), default=0)
    return 1 << (most - 1).bit_length() if most else 0
