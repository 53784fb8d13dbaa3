"""Attention with aiter's kernels for AMD Instinct GPUs, over pages of 1 or 16 tokens.

    decode only   paged_attention_ragged, which divides a row's keys among partitions of 256 tokens
    other steps   mha_batch_prefill_func for rows of any length

The decode kernel knows no sliding window. Index arrays of a captured shape stay at their addresses, and its number of
partitions is that of the longest context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv_gpu.facts import AITER_GROUP, AITER_HEADS, AITER_TRAITS
from srv_gpu.page_indices import page_indices
from srv_gpu.platform import hardware_of
from srv_gpu.step import Step, StepPlanner

_PARTITION = 256  # tokens
_MAXIMUM_AND_SUM = 8  # bytes per partition result, besides the result


@dataclass(frozen=True, slots=True)
class _Metadata:
    """One step; all on the device. indptr int32 [rows + 1], indices, last int32 [rows]: see `srv_gpu.page_indices`."""

    step: Step
    indptr: Tensor
    indices: Tensor
    last: Tensor


class AiterAttention:
    """The "aiter" attention backend. Implements `srv.platform.interface.AttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend aiter needs a KV pool, but none was allocated")
        hardware = hardware_of(context)
        self._aiter = hardware.accelerator.library("aiter")
        self._write_kv = hardware.write_kv
        self.kv_writer = hardware.kv_writer
        self._transfers, self._device = context.transfers, context.device
        self._keys, self._values = context.kv.keys, context.kv.values
        self._page_size = context.kv.layout.page_size
        self._planner = StepPlanner(self._page_size, context.device, context.transfers)
        self._one = torch.ones(1, dtype=torch.float32, device=context.device)
        self._captured: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        reasons = []
        if layer.head_dim not in AITER_HEADS:
            reasons.append(f"head_dim {layer.head_dim} is not {' or '.join(map(str, AITER_HEADS))}")
        if layer.heads // layer.kv_heads > AITER_GROUP:
            reasons.append(f"{layer.heads // layer.kv_heads} query heads share a KV head, more than {AITER_GROUP}")
        if missing := missing_traits(AITER_TRAITS, layer):
            reasons.append(missing)
        return "; ".join(reasons) or None

    def plan(self, batch: AttentionBatch) -> _Metadata:
        """See `srv.platform.interface.AttentionBackend`."""
        step, pages = self._planner.plan(batch), page_indices(batch, self._page_size, self._transfers)
        if batch.graph is None:
            return _Metadata(
                step, self._transfers.upload(pages.indptr), pages.indices, self._transfers.upload(pages.last)
            )
        fixed = self._captured.get(batch.graph)
        if fixed is None:
            counts = (batch.graph + 1, batch.page_table.numel(), batch.graph)
            indptr, indices, last = (torch.zeros(count, dtype=torch.int32, device=self._device) for count in counts)
            fixed = self._captured[batch.graph] = (indptr, indices, last)
        indptr, indices, last = fixed
        self._transfers.update(indptr, torch.from_numpy(pages.indptr))
        self._transfers.update(last, torch.from_numpy(pages.last))
        indices[: len(pages.indices)].copy_(pages.indices)
        return _Metadata(step, indptr, indices, last)

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: _Metadata) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        keys, values = self._keys[layer.index], self._values[layer.index]
        self._write_kv(k, v, keys, values, metadata.step.slots)
        query = q.contiguous()
        if max(metadata.step.query_lens) == 1:
            return self._decode(layer, query, keys, values, metadata)
        out: Tensor = self._aiter.mha_batch_prefill_func(
            query,
            keys,
            values,
            metadata.step.starts,
            metadata.indptr,
            metadata.indices,
            max(metadata.step.query_lens),
            metadata.step.longest,
            softmax_scale=layer.scale,
            logits_soft_cap=layer.soft_cap or 0.0,
            causal=True,
            kv_last_page_lens=metadata.last,
        )
        return out

    def _decode(self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, metadata: _Metadata) -> Tensor:
        out = torch.empty_like(q)
        partitions = -(-metadata.step.longest // _PARTITION)
        size = q.shape[0] * layer.heads * partitions * (_MAXIMUM_AND_SUM + layer.head_dim * q.element_size())
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        self._aiter.paged_attention_ragged(
            out,
            workspace,
            q,
            keys,
            values,
            layer.scale,
            metadata.indptr,
            metadata.indices,
            metadata.last,
            self._page_size,
            partitions,
            None,
            "auto",
            "NHD",
            layer.soft_cap or 0.0,
            self._one,
            self._one,
            None,
            _PARTITION,
        )
        return out
