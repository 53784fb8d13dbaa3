"""Attention through torch_npu's fused operator (npu_fused_infer_attention_score), over 128-token pages.

It writes keys and values into the pool and makes the calls into which `srv_npu.step_rows` divides the rows of a step.
The operator takes sequence lengths as host integers, so a captured graph records them: each replay must update them
(`srv_npu.graphs`).

    decode rows                        BSH  [rows, 1, heads * dim], into preallocated output and workspace
    rows in one call (TND)             TND  [tokens, heads, dim], right-aligned causal: head dim 128 or 192
    a longer row                       BSND [1, queries, heads, dim], right-aligned causal or a band
    key dim 192 with value dim 128     always TND, the only layout in which the two may differ; decode-only steps still
                                       use preallocated output and workspace
    encoders                           `srv_npu.both_ways`, over keys and values of the step

    pool [pages + 1, 128, kv_heads * dim], written as slots [(pages + 1) * 128, kv_heads * dim]; keys and values are
    separate tensors
    slot of token t of a row = page_table[row, t // 128] * 128 + t % 128
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.transfers import Transfers
from srv_npu.both_ways import BothWays, whole_sequences
from srv_npu.graphs import HostLengths, NpuGraphs
from srv_npu.limits import (
    BAND,
    CAUSAL,
    KV_ORDER,
    MASK,
    PACKED_DIMS,
    PACKED_ROWS,
    PAGE,
    TRAITS,
    head_reasons,
    window_reason,
)
from srv_npu.platform import NpuPlatform
from srv_npu.sdk import Sdk
from srv_npu.step_rows import Decode, Ints, Packed, RowPlanner, SingleRow, Step


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What one step's attention calls need, computed once per step.

    slots: int32 [tokens, 1] on the device, where the new keys and values are written. Both are None for an encoder,
    whose sequences are the tokens `ends[i - 1]` to `ends[i]` of the step.
    """

    slots: Tensor | None
    step: Step | None
    ends: list[int] = field(default_factory=list)


class AscendAttention:
    """Implements `srv.platform.interface.AttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend ascend needs a KV pool, but none was allocated")
        layout = context.kv.layout
        if layout.group.layers and (layout.order, layout.page_size) != (KV_ORDER, PAGE):  # encoders read no pages
            raise InternalError(
                f"ascend reads {KV_ORDER} pages of {PAGE} tokens, not {layout.order} pages of {layout.page_size}"
            )
        self._sdk, self._graphs = sdk_of(context), graphs_of(context)
        self._device = context.device
        self._keys, self._values = context.kv.keys, context.kv.values
        self._value_dim = layout.group.value_dim
        self._window = layout.group.window
        can_pack = (layout.group.key_dim, self._value_dim) in PACKED_DIMS and context.max_rows <= PACKED_ROWS
        self._dims_differ = layout.group.key_dim != self._value_dim
        if self._dims_differ and not can_pack:
            raise InternalError(
                f"ascend cannot read keys of {layout.group.key_dim} with values of {self._value_dim} elements in steps "
                f"of up to {context.max_rows} rows"
            )
        self._mask = causal_mask(self._device)
        self._transfers = context.transfers
        self._planner = RowPlanner(context.transfers, can_pack=can_pack, needs_ends=self._dims_differ)
        self._both_ways = BothWays(self._sdk, self._mask, can_pack=can_pack)
        self._captured: dict[int, AttentionMetadata] = {}

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`. No operand caps scores, or adds sinks or position biases."""
        reasons = head_reasons(layer.heads, layer.kv_heads, layer.head_dim)
        reasons += [
            f"its operator does not compute {phrase}" for trait, phrase in layer.traits().items() if trait not in TRAITS
        ]
        if self._dims_differ and layer.window is not None:
            reasons.append(window_reason(layer.window, layer.head_dim, self._value_dim))
        return "; ".join(reasons) or None

    # Planning, once per step

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """See `srv.platform.interface.AttentionBackend`."""
        queries = np.asarray(batch.query_lens, dtype=np.int64)
        kv_lens = [int(length) for length in batch.kv_lens]
        if not self._keys:
            return AttentionMetadata(None, None, whole_sequences(queries, kv_lens))
        table = batch.page_table.contiguous()
        slots = token_slots(self._transfers, queries, np.asarray(kv_lens, dtype=np.int64), table)
        if batch.graph is not None:
            return self._captured_step(batch.graph, slots, kv_lens, table)
        step = Step(queries, HostLengths(kv_lens), table, max(kv_lens), captured=False)
        self._planner.rows(step, self._window)
        return AttentionMetadata(slots, step)

    def _captured_step(self, rows: int, slots: Tensor, kv_lens: list[int], table: Tensor) -> AttentionMetadata:
        """A captured kernel reads its operands at fixed addresses: those of the first step of this size."""
        if rows not in self._captured:
            queries = np.ones(rows, dtype=np.int64)
            step = Step(queries, HostLengths(kv_lens), table, table.shape[1] * PAGE, captured=True)
            self._planner.rows(step, self._window)
            self._captured[rows] = AttentionMetadata(slots, step)
            return self._captured[rows]
        captured = self._captured[rows]
        assert captured.slots is not None
        assert captured.step is not None
        captured.slots.copy_(slots)
        captured.step.kv_lens.values = kv_lens
        self._planner.refresh(captured.step)
        return captured

    # Attention, once per layer

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        query = q.contiguous()
        if layer.bidirectional:
            return self._both_ways.attend(layer, query, k.contiguous(), v.contiguous(), metadata.ends)
        assert metadata.slots is not None
        assert metadata.step is not None
        keys, values = self._keys[layer.index], self._values[layer.index]
        write_tokens(self._sdk, keys, k, metadata.slots)
        write_tokens(self._sdk, values, v, metadata.slots)
        rows = self._planner.rows(metadata.step, layer.window)
        if rows.packed is not None:
            return self._attend_packed(layer, query, keys, values, rows.packed)
        decode = rows.decode
        if decode is not None and decode.tokens is None:
            return self._attend_decode(layer, query, keys, values, decode)
        out = torch.empty_like(query)  # the value dim is the key dim here: other models always take the packed path
        if decode is not None and decode.tokens is not None:
            decoded = self._attend_decode(layer, query.index_select(0, decode.tokens), keys, values, decode)
            out.index_copy_(0, decode.tokens, decoded)
        for row in rows.single_rows:
            query_row = query[row.begin : row.end]
            out[row.begin : row.end] = self._attend_single(layer, query_row, keys, values, row, rows.window)
        return out

    def _attend_decode(self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, rows: Decode) -> Tensor:
        """q [rows, heads, key_dim] -> [rows, heads, value_dim]."""
        count = q.shape[0]
        if rows.ends is None:
            query = q.view(count, 1, -1)
            out = torch.empty_like(query)
            options = {**_sizes(layer, rows.table, "BSH"), "actual_seq_lengths_kv": rows.kv_lens.values}
            if rows.mask is not None:
                options["atten_mask"] = rows.mask
        else:
            query = q
            out = q.new_empty(count, layer.heads, self._value_dim)
            options = self._packed_options(layer, rows.table, rows.ends, rows.kv_lens.values)
        sizes = (layer.heads, layer.kv_heads, layer.head_dim)
        if sizes not in rows.workspaces:
            get_workspace = self._sdk._npu_fused_infer_attention_score_get_max_workspace
            rows.workspaces[sizes] = get_workspace(query, keys, values, **options)
        no_lse = torch.empty(1, dtype=torch.float32, device=query.device)  # required, but not filled
        self._graphs.attends(rows.kv_lens)
        self._sdk.npu_fused_infer_attention_score.out(
            query, keys, values, **options, workspace=rows.workspaces[sizes], out=[out, no_lse]
        )
        return out.view(count, layer.heads, self._value_dim)

    def _attend_packed(self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, rows: Packed) -> Tensor:
        """q [tokens, heads, key_dim] -> [tokens, heads, value_dim]."""
        options = self._packed_options(layer, rows.table, rows.ends, rows.kv_lens)
        out: Tensor = self._sdk.npu_fused_infer_attention_score(q, keys, values, **options)[0]
        return out

    def _packed_options(
        self, layer: AttentionLayer, table: Tensor, ends: list[int], kv_lens: list[int]
    ) -> dict[str, Any]:
        return {
            **_sizes(layer, table, "TND"),
            "atten_mask": self._mask,
            "sparse_mode": CAUSAL,
            "actual_seq_lengths": ends,
            "actual_seq_lengths_kv": kv_lens,
        }

    def _attend_single(
        self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, row: SingleRow, window: int | None
    ) -> Tensor:
        """q [queries, heads, dim] -> [queries, heads, dim]."""
        mask: dict[str, Any] = {"sparse_mode": CAUSAL}
        if window is not None:
            mask = {"sparse_mode": BAND, "pre_tokens": window - 1, "next_tokens": 0}
        out: Tensor = self._sdk.npu_fused_infer_attention_score(
            q.unsqueeze(0),
            keys,
            values,
            **_sizes(layer, row.table, "BSND"),
            **mask,
            atten_mask=self._mask,
            actual_seq_lengths=[row.end - row.begin],
            actual_seq_lengths_kv=[row.kv_len],
        )[0]
        return out.squeeze(0)


def causal_mask(device: torch.device) -> Tensor:
    """True where a key is masked out; the operator applies this one square mask to rows of any length."""
    return torch.ones(MASK, MASK, dtype=torch.bool).triu_(1).to(device)


def token_slots(transfers: Transfers, queries: Ints, kv_lens: Ints, table: Tensor) -> Tensor:
    """int32 [tokens, 1], computed on the host except for the page numbers, which may exist only on the device."""
    ends = np.cumsum(queries)
    positions = np.arange(int(ends[-1])) + np.repeat(kv_lens - ends, queries)
    rows = np.repeat(np.arange(len(queries)), queries)
    entries = np.stack((rows * table.shape[1] + positions // PAGE, positions % PAGE))
    moved = transfers.upload(entries)
    pages = table.flatten().index_select(0, moved[0])
    return (pages * PAGE + moved[1].to(torch.int32)).unsqueeze(1)


def write_tokens(sdk: Sdk, pool: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write new [tokens, kv_heads, dim] into slots of the pool, whose dtype is the model's."""
    rows = new.reshape(new.shape[0], -1).contiguous()
    sdk.npu_scatter_nd_update_(pool.view(-1, pool.shape[-1]), slots, rows)


def sdk_of(context: BackendContext) -> Sdk:
    """The SDK of the backend's platform. InternalError unless that is the npu platform."""
    return _npu(context)._sdk()


def graphs_of(context: BackendContext) -> NpuGraphs:
    """The captured steps of the backend's platform. InternalError unless that is the npu platform."""
    return _npu(context).graphs


def _npu(context: BackendContext) -> NpuPlatform:
    if not isinstance(context.platform, NpuPlatform):
        raise InternalError(f"a backend of the npu platform was built for {context.platform.name}")
    return context.platform


def _sizes(layer: AttentionLayer, table: Tensor, layout: str) -> dict[str, Any]:
    return {
        "num_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "scale": layer.scale,
        "input_layout": layout,
        "block_table": table,
        "block_size": PAGE,
    }
