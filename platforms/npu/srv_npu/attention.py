"""Attention through torch_npu's fused operator (npu_fused_infer_attention_score), over 128-token pages.

It turns the rows of a step into calls of that operator and writes keys and values into the pool. The operator takes
sequence lengths as host integers, so a captured graph records them: each replay must update them to
`AttentionMetadata.kv_lens` (`srv_npu.graphs`).

    decode only                        BSH  [rows, 1, heads * dim]: one call, into preallocated output and workspace
    head dim 128 or 192                TND  [tokens, heads, dim]: one call for rows of any length, right-aligned causal
    other head dims                    decode rows as above; each longer row is a BSND call [1, queries, heads, dim]
    key dim 192 with value dim 128     always TND, the only layout in which the two may differ; decode-only steps still
                                       use preallocated output and workspace

    pool [pages + 1, 128, kv_heads * dim], written as slots [(pages + 1) * 128, kv_heads * dim]; keys and values are
    separate tensors
    slot of token t of a row = page_table[row, t // 128] * 128 + t % 128
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.transfers import Transfers
from srv_npu.limits import KV_ORDER, MASK, PACKED_DIMS, PACKED_ROWS, PAGE, head_reasons
from srv_npu.platform import NpuPlatform
from srv_npu.sdk import Sdk

CAUSAL = 3  # sparse mode "right-down causal": the last query sees every key, the one before it all but one

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows with one query token each.

    tokens: int64, the indices of these tokens in the step; None if the step has only such rows, in order.
    ends: cumulative query lengths; None for BSH, which takes none. table: int32 [rows, columns].
    workspaces: the operator's scratch memory by (heads, kv_heads, head_dim), allocated once and shared by every layer
    with those sizes.
    """

    tokens: Tensor | None
    ends: list[int] | None
    kv_lens: list[int]
    table: Tensor
    workspaces: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of any length in one call. ends: cumulative query lengths. kv_lens: per row, not cumulative."""

    ends: list[int]
    kv_lens: list[int]
    table: Tensor


@dataclass(frozen=True, slots=True)
class SingleRow:
    """One row with several query tokens, the tokens [begin, end) of the step. table: int32 [1, columns]."""

    begin: int
    end: int
    kv_len: int
    table: Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What one step's attention calls need, computed once per step.

    slots: int32 [tokens, 1] on the device, where the new keys and values are written. kv_lens: all rows, on the host.
    """

    slots: Tensor
    kv_lens: list[int]
    decode: Decode | None = None
    packed: Packed | None = None
    single_rows: tuple[SingleRow, ...] = ()


class AscendAttention:
    """Implements `srv.platform.interface.AttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend ascend needs a KV pool, but none was allocated")
        layout = context.kv.layout
        if (layout.order, layout.page_size) != (KV_ORDER, PAGE):
            raise InternalError(
                f"ascend reads {KV_ORDER} pages of {PAGE} tokens, not {layout.order} pages of {layout.page_size}"
            )
        self._sdk = sdk_of(context)
        self._device = context.device
        self._keys, self._values = context.kv.keys, context.kv.values
        self._value_dim = layout.group.value_dim
        self._can_pack = (layout.group.key_dim, self._value_dim) in PACKED_DIMS and context.max_rows <= PACKED_ROWS
        self._dims_differ = layout.group.key_dim != self._value_dim
        if self._dims_differ and not self._can_pack:
            raise InternalError(
                f"ascend cannot read keys of {layout.group.key_dim} with values of {self._value_dim} elements in steps "
                f"of up to {context.max_rows} rows"
            )
        self._mask = causal_mask(self._device)
        self._transfers = context.transfers
        self._captured: dict[int, tuple[Tensor, dict[tuple[int, int, int], Tensor]]] = {}

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`. Decode masks by length only, and no operator caps scores."""
        reasons = head_reasons(layer.heads, layer.kv_heads, layer.head_dim)
        reasons += [f"its operator does not compute {phrase}" for phrase in layer.traits().values()]
        return "; ".join(reasons) or None

    # Planning, once per step

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """See `srv.platform.interface.AttentionBackend`."""
        queries = np.asarray(batch.query_lens, dtype=np.int64)
        kv_lens = [int(length) for length in batch.kv_lens]
        table = batch.page_table.contiguous()
        slots = token_slots(self._transfers, queries, np.asarray(kv_lens, dtype=np.int64), table)
        if batch.graph is not None:
            return self._captured_step(batch.graph, slots, kv_lens, table)
        if int(queries.max()) == 1:
            return AttentionMetadata(slots, kv_lens, decode=Decode(None, self._row_ends(len(queries)), kv_lens, table))
        ends = np.cumsum(queries)
        if self._can_pack:
            return AttentionMetadata(slots, kv_lens, packed=Packed(ends.tolist(), kv_lens, table))
        return AttentionMetadata(
            slots, kv_lens, self._decode_rows(queries, ends, kv_lens, table), None, _prefill_rows(ends, kv_lens, table)
        )

    def _captured_step(self, rows: int, slots: Tensor, kv_lens: list[int], table: Tensor) -> AttentionMetadata:
        """A captured kernel reads slots and workspaces at fixed addresses: those of the first step of this size."""
        if rows not in self._captured:
            self._captured[rows] = (torch.empty_like(slots), {})
        fixed_slots, workspaces = self._captured[rows]
        fixed_slots.copy_(slots)
        return AttentionMetadata(
            fixed_slots, kv_lens, decode=Decode(None, self._row_ends(rows), kv_lens, table, workspaces)
        )

    def _row_ends(self, rows: int) -> list[int] | None:
        """Cumulative query lengths of decode rows, which only TND takes."""
        return list(range(1, rows + 1)) if self._dims_differ else None

    def _decode_rows(self, queries: Ints, ends: Ints, kv_lens: list[int], table: Tensor) -> Decode | None:
        """The rows with one query token, in a step that also has longer ones."""
        rows = np.flatnonzero(queries == 1)
        if len(rows) == 0:
            return None
        tokens, index = (self._transfers.upload(each) for each in (ends[rows] - 1, rows))
        return Decode(tokens, None, [kv_lens[row] for row in rows], table.index_select(0, index))

    # Attention, once per layer

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        keys, values = self._keys[layer.index], self._values[layer.index]
        write_tokens(self._sdk, keys, k, metadata.slots)
        write_tokens(self._sdk, values, v, metadata.slots)
        query = q.contiguous()
        if metadata.packed is not None:
            return self._attend_packed(layer, query, keys, values, metadata.packed)
        if metadata.decode is not None and metadata.decode.tokens is None:
            return self._attend_decode(layer, query, keys, values, metadata.decode)
        out = torch.empty_like(query)  # the value dim is the key dim here: other models always take the packed path
        if metadata.decode is not None and metadata.decode.tokens is not None:
            tokens = metadata.decode.tokens
            decoded = self._attend_decode(layer, query.index_select(0, tokens), keys, values, metadata.decode)
            out.index_copy_(0, tokens, decoded)
        for row in metadata.single_rows:
            out[row.begin : row.end] = self._attend_single(layer, query[row.begin : row.end], keys, values, row)
        return out

    def _attend_decode(self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, rows: Decode) -> Tensor:
        """q [rows, heads, key_dim] -> [rows, heads, value_dim]."""
        count = q.shape[0]
        if rows.ends is None:
            query = q.view(count, 1, -1)
            out = torch.empty_like(query)
            options = {**_sizes(layer, rows.table, "BSH"), "actual_seq_lengths_kv": rows.kv_lens}
        else:
            query = q
            out = q.new_empty(count, layer.heads, self._value_dim)
            options = self._packed_options(layer, rows.table, rows.ends, rows.kv_lens)
        sizes = (layer.heads, layer.kv_heads, layer.head_dim)
        if sizes not in rows.workspaces:
            get_workspace = self._sdk._npu_fused_infer_attention_score_get_max_workspace
            rows.workspaces[sizes] = get_workspace(query, keys, values, **options)
        no_lse = torch.empty(1, dtype=torch.float32, device=query.device)  # required, but not filled
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

    def _attend_single(self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, row: SingleRow) -> Tensor:
        """q [queries, heads, dim] -> [queries, heads, dim]."""
        out: Tensor = self._sdk.npu_fused_infer_attention_score(
            q.unsqueeze(0),
            keys,
            values,
            **_sizes(layer, row.table, "BSND"),
            atten_mask=self._mask,
            sparse_mode=CAUSAL,
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
    if not isinstance(context.platform, NpuPlatform):
        raise InternalError(f"a backend of the npu platform was built for {context.platform.name}")
    return context.platform._sdk()


def _sizes(layer: AttentionLayer, table: Tensor, layout: str) -> dict[str, Any]:
    return {
        "num_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "scale": layer.scale,
        "input_layout": layout,
        "block_table": table,
        "block_size": PAGE,
    }


def _prefill_rows(ends: Ints, kv_lens: Sequence[int], table: Tensor) -> tuple[SingleRow, ...]:
    """The rows with several query tokens, which need a call each."""
    begins = [0, *ends[:-1].tolist()]
    return tuple(
        SingleRow(begin, end, kv_lens[row], table[row : row + 1])
        for row, (begin, end) in enumerate(zip(begins, ends.tolist(), strict=True))
        if end - begin > 1
    )
