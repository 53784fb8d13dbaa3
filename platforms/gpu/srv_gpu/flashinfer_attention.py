"""Attention with FlashInfer's wrappers for paged caches, over pages of any size.

    plan      host: page indices; FlashInfer schedules each kind of layer (heads, scale, window, soft cap) once per step
    forward   write keys and values, then `run` with the schedule of the layer's kind

The kinds are known when layers are first called. A captured shape has its own wrappers in FlashInfer's graph mode: the
runs before its capture plan them, and every later `plan` of that shape plans them again, outside the graph.

A wrapper copies its schedule from page-locked memory of its own, without waiting. So before it is planned again, the
host waits for that copy, which follows the step before the last one: steps still overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv_gpu.facts import FLASHINFER_HEADS, TRAITS
from srv_gpu.page_indices import PageIndices, page_indices
from srv_gpu.platform import hardware_of
from srv_gpu.step import Step, StepPlanner

_WORKSPACE = 384 << 20  # bytes, for partial results
_TENSOR_CORE_GROUP = 4  # query heads per KV head from which decode is faster with tensor cores


class _Kind(NamedTuple):
    """What a schedule depends on besides the step."""

    heads: int
    scale: float
    window: int | None
    soft_cap: float | None
    dtype: torch.dtype


@dataclass(slots=True)
class _Wrapper:
    """One of FlashInfer's wrappers. planned: an event behind the copy of its last schedule."""

    wrapper: Any
    planned: Any


@dataclass(frozen=True, slots=True)
class _Metadata:
    """One step. pages: by window. wrappers: those that are planned for it, by kind."""

    step: Step
    batch: AttentionBatch
    pages: dict[int | None, PageIndices] = field(default_factory=dict)
    wrappers: dict[_Kind, _Wrapper] = field(default_factory=dict)


class FlashInferAttention:
    """The "flashinfer" attention backend. Implements `srv.platform.interface.AttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend flashinfer needs a KV pool, but none was allocated")
        hardware = hardware_of(context)
        self._accelerator, self._write_kv = hardware.accelerator, hardware.write_kv
        self.kv_writer = hardware.kv_writer
        self._flashinfer = hardware.accelerator.library("flashinfer")
        self._staging = context.platform.staging
        self._transfers, self._device = context.transfers, context.device
        self._keys, self._values = context.kv.keys, context.kv.values
        layout = context.kv.layout
        self._page_size, self._kv_heads = layout.page_size, layout.group.kv_heads
        self._head_dim: int = layout.group.key_dim
        self._planner = StepPlanner(self._page_size, context.device, context.transfers)
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=context.device)
        # By captured rows (0: not captured), whether for decode, and kind.
        self._wrappers: dict[tuple[int, bool, _Kind], _Wrapper] = {}
        self._captured_indices: Tensor | None = None

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        if layer.head_dim in FLASHINFER_HEADS:
            return missing_traits(TRAITS, layer)
        return f"head_dim {layer.head_dim} is not among {', '.join(map(str, FLASHINFER_HEADS))}"

    # Planning, once per step

    def plan(self, batch: AttentionBatch) -> _Metadata:
        """See `srv.platform.interface.AttentionBackend`."""
        metadata = _Metadata(self._planner.plan(batch), batch)
        if batch.graph is not None:
            for rows, _, kind in tuple(self._wrappers):
                if rows == batch.graph:
                    self._schedule(metadata, kind)
        return metadata

    def _schedule(self, metadata: _Metadata, kind: _Kind) -> _Wrapper:
        """Plan the wrapper of a kind of layer for this step."""
        rows, decode = metadata.step.rows or 0, max(metadata.step.query_lens) == 1
        key = (rows, decode, kind)
        entry = self._wrappers.get(key)
        if entry is None:
            wrapper = self._decode_wrapper(metadata.step, kind) if decode else self._prefill_wrapper()
            entry = self._wrappers[key] = _Wrapper(wrapper, self._accelerator.module.Event())
        entry.planned.synchronize()
        pages = self._pages(metadata, kind.window)
        arrays = [self._pinned(pages.indptr), pages.indices, self._pinned(pages.last)]
        options = {
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.soft_cap,
            "q_data_type": kind.dtype,
            "kv_data_type": self._keys[0].dtype,
            "sm_scale": kind.scale,
            "non_blocking": True,
        }
        sizes = (kind.heads, self._kv_heads, self._head_dim, self._page_size)
        if decode:
            entry.wrapper.plan(*arrays, *sizes, **options)
        else:
            starts = np.cumsum([0, *metadata.step.query_lens])
            entry.wrapper.plan(self._pinned(starts), *arrays, *sizes, causal=True, **options)
        entry.planned.record()
        metadata.wrappers[kind] = entry
        return entry

    def _pages(self, metadata: _Metadata, window: int | None) -> PageIndices:
        if window not in metadata.pages:
            metadata.pages[window] = page_indices(metadata.batch, self._page_size, self._transfers, window)
        return metadata.pages[window]

    def _prefill_wrapper(self) -> Any:
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")

    def _decode_wrapper(self, step: Step, kind: _Kind) -> Any:
        fixed: dict[str, Any] = {}
        if step.rows is not None:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._integers(step.rows + 1),
                "paged_kv_indices_buffer": self._all_indices(step),
                "paged_kv_last_page_len_buffer": self._integers(step.rows),
            }
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=kind.heads // self._kv_heads >= _TENSOR_CORE_GROUP, **fixed
        )

    def _all_indices(self, step: Step) -> Tensor:
        """For the page indices of a captured step. One replay follows another, so that all share this memory."""
        most = step.page_table.shape[0] * step.page_table.shape[1]
        if self._captured_indices is None or len(self._captured_indices) < most:
            self._captured_indices = self._integers(most)  # a wrapper that has an older one keeps it
        return self._captured_indices[:most]

    def _integers(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)

    def _pinned(self, values: np.ndarray[Any, Any]) -> Tensor:
        """int32, in page-locked memory that is not reused: FlashInfer copies from it later."""
        return self._staging((len(values),), torch.int32).copy_(torch.from_numpy(values))

    # Attention, once per layer

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: _Metadata) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        keys, values = self._keys[layer.index], self._values[layer.index]
        self._write_kv(k, v, keys, values, metadata.step.slots)
        kind = _Kind(layer.heads, layer.scale, layer.window, layer.soft_cap, q.dtype)
        planned = metadata.wrappers.get(kind) or self._schedule(metadata, kind)
        out: Tensor = planned.wrapper.run(q.contiguous(), (keys, values))
        return out
