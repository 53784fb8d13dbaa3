"""Attention through torch_npu's fused operator (npu_fused_infer_attention_score), over 128-token pages.

Owns how a step's rows become calls of that operator, and the writing of keys and values. The operator takes sequence
lengths as host integers, which makes them part of a captured graph: `Step.kv_lens` is what a replay must apply
(`srv_npu.graphs`).

    every row of one query        BSH  [rows, 1, heads * dim], one call into a given output and workspace
    heads of 128 or 192           TND  [tokens, heads, dim], one call for rows of any lengths, causal from the right
    other heads                   rows of one query as above; longer ones BSND [1, queries, heads, dim], a call each
    keys of 192, values of 128    TND for every row, since no other layout takes two lengths; rows of one query go into
                                  a given output and workspace all the same

    pool [pages + 1, 128, kv_heads * dim], written as slots [(pages + 1) * 128, kv_heads * dim]; keys and values apart
    slot of token t of a row = page_table[row, t // 128] * 128 + t % 128
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv_npu.limits import KV_ORDER, MASK, PACKED_DIMS, PACKED_ROWS, PAGE
from srv_npu.platform import NpuPlatform
from srv_npu.sdk import Sdk

_STEPS_KEPT = 8  # more than are ever on their way at once
_CAUSAL = 3  # sparse mode "right-down causal": the last query sees every key, the one before it one less

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows of one query each. `tokens`: int64, their places in the token axis; None: everywhere, in order.

    ends: where each row ends in the token axis; None where the layout has none (BSH). table: int32 [rows, columns].
    `workspaces`: by the sizes of a layer, the operator's scratch memory, asked for once and used by every layer of
    those sizes.
    """

    tokens: Tensor | None
    ends: list[int] | None
    kv_lens: list[int]
    table: Tensor
    workspaces: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of any lengths. `ends`: where each ends in the token axis. kv_lens: of each row, not added up."""

    ends: list[int]
    kv_lens: list[int]
    table: Tensor


@dataclass(frozen=True, slots=True)
class Alone:
    """A row of several queries, tokens [begin, end) of the step. table: int32 [1, columns]."""

    begin: int
    end: int
    kv_len: int
    table: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One step's metadata. slots: int32 [tokens, 1] on the device, where its keys and values go.

    `kv_lens`: every row's, on the host.
    """

    slots: Tensor
    kv_lens: list[int]
    decode: Decode | None = None
    packed: Packed | None = None
    alone: tuple[Alone, ...] = ()


class AscendAttention:
    """Implements `srv.platform.interface.AttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend ascend was built without a KV pool; it needs one")
        layout = context.kv.layout
        if (layout.order, layout.page_size) != (KV_ORDER, PAGE):
            raise InternalError(f"ascend reads {KV_ORDER} pages of {PAGE}, not {layout.order} of {layout.page_size}")
        self._sdk = sdk_of(context)
        self._device = context.device
        self._keys, self._values = context.kv.keys, context.kv.values
        self._value_dim = layout.group.value_dim
        self._packs = (layout.group.key_dim, self._value_dim) in PACKED_DIMS and context.max_rows <= PACKED_ROWS
        self._two_lengths = layout.group.key_dim != self._value_dim
        if self._two_lengths and not self._packs:
            raise InternalError(
                f"ascend cannot read keys of {layout.group.key_dim} with values of {self._value_dim} elements in steps "
                f"of up to {context.max_rows} rows"
            )
        # Ones where a key is hidden; the operator shifts this one square over rows of any length.
        self._mask = torch.ones(MASK, MASK, dtype=torch.bool).triu_(1).to(self._device)
        # torch_npu reads the host memory of a copy late, when its queue gets there, and keeps nothing alive for it.
        self._sources: deque[Tensor] = deque(maxlen=_STEPS_KEPT)
        self._captured: dict[int, tuple[Tensor, dict[tuple[int, int, int], Tensor]]] = {}

    # Planning, once a step

    def plan(self, batch: AttentionBatch) -> Step:
        """See `srv.platform.interface.AttentionBackend`."""
        queries = np.asarray(batch.query_lens, dtype=np.int64)
        kv_lens = [int(length) for length in batch.kv_lens]
        table = batch.page_table.contiguous()
        slots = self._slots(queries, np.asarray(kv_lens, dtype=np.int64), table)
        if batch.graph is not None:
            return self._captured_step(batch.graph, slots, kv_lens, table)
        if int(queries.max()) == 1:
            return Step(slots, kv_lens, decode=Decode(None, self._row_ends(len(queries)), kv_lens, table))
        ends = np.cumsum(queries)
        if self._packs:
            return Step(slots, kv_lens, packed=Packed(ends.tolist(), kv_lens, table))
        return Step(slots, kv_lens, self._short(queries, ends, kv_lens, table), None, _long(ends, kv_lens, table))

    def _captured_step(self, rows: int, slots: Tensor, kv_lens: list[int], table: Tensor) -> Step:
        """A captured kernel reads its slots, and scratch memory, at the addresses of the first such step."""
        if rows not in self._captured:
            self._captured[rows] = (torch.empty_like(slots), {})
        kept, workspaces = self._captured[rows]
        kept.copy_(slots)
        return Step(kept, kv_lens, decode=Decode(None, self._row_ends(rows), kv_lens, table, workspaces))

    def _row_ends(self, rows: int) -> list[int] | None:
        """Where rows of one query end, for the layout that asks (TND)."""
        return list(range(1, rows + 1)) if self._two_lengths else None

    def _slots(self, queries: Ints, kv_lens: Ints, table: Tensor) -> Tensor:
        """int32 [tokens, 1]. Worked out on the host but for the page, which the device alone may know."""
        ends = np.cumsum(queries)
        positions = np.arange(int(ends[-1])) + np.repeat(kv_lens - ends, queries)
        rows = np.repeat(np.arange(len(queries)), queries)
        entries = np.stack((rows * table.shape[1] + positions // PAGE, positions % PAGE))
        source = torch.from_numpy(entries)
        self._sources.append(source)
        moved = source.to(self._device, non_blocking=True)
        pages = table.flatten().index_select(0, moved[0])
        return (pages * PAGE + moved[1].to(torch.int32)).unsqueeze(1)

    def _short(self, queries: Ints, ends: Ints, kv_lens: list[int], table: Tensor) -> Decode | None:
        """The rows of one query among longer ones."""
        rows = np.flatnonzero(queries == 1)
        if len(rows) == 0:
            return None
        tokens, index = (torch.from_numpy(each).to(self._device) for each in (ends[rows] - 1, rows))
        return Decode(tokens, None, [kv_lens[row] for row in rows], table.index_select(0, index))

    # Attending, once a layer

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: Step) -> Tensor:
        """See `srv.platform.interface.AttentionBackend`."""
        _check(layer, metadata)
        keys, values = self._keys[layer.index], self._values[layer.index]
        self._write(keys, k, metadata.slots)
        self._write(values, v, metadata.slots)
        query = q.contiguous()
        if metadata.packed is not None:
            return self._attend_packed(layer, query, keys, values, metadata.packed)
        if metadata.decode is not None and metadata.decode.tokens is None:
            return self._attend_decode(layer, query, keys, values, metadata.decode)
        out = torch.empty_like(query)  # values as long as keys: others were packed
        if metadata.decode is not None and metadata.decode.tokens is not None:
            tokens = metadata.decode.tokens
            short = self._attend_decode(layer, query.index_select(0, tokens), keys, values, metadata.decode)
            out.index_copy_(0, tokens, short)
        for row in metadata.alone:
            out[row.begin : row.end] = self._attend_alone(layer, query[row.begin : row.end], keys, values, row)
        return out

    def _write(self, pool: Tensor, new: Tensor, slots: Tensor) -> None:
        """new [tokens, kv_heads, dim] into slots of the pool, in the pool's dtype, which is the model's."""
        rows = new.reshape(new.shape[0], -1).contiguous()
        self._sdk.npu_scatter_nd_update_(pool.view(-1, pool.shape[-1]), slots, rows)

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
            ask = self._sdk._npu_fused_infer_attention_score_get_max_workspace
            rows.workspaces[sizes] = ask(query, keys, values, **options)
        no_sums = torch.empty(1, dtype=torch.float32, device=query.device)  # they are not asked for
        self._sdk.npu_fused_infer_attention_score.out(
            query, keys, values, **options, workspace=rows.workspaces[sizes], out=[out, no_sums]
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
            "sparse_mode": _CAUSAL,
            "actual_seq_lengths": ends,
            "actual_seq_lengths_kv": kv_lens,
        }

    def _attend_alone(self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, row: Alone) -> Tensor:
        """q [queries, heads, dim] -> the same."""
        out: Tensor = self._sdk.npu_fused_infer_attention_score(
            q.unsqueeze(0),
            keys,
            values,
            **_sizes(layer, row.table, "BSND"),
            atten_mask=self._mask,
            sparse_mode=_CAUSAL,
            actual_seq_lengths=[row.end - row.begin],
            actual_seq_lengths_kv=[row.kv_len],
        )[0]
        return out.squeeze(0)


def sdk_of(context: BackendContext) -> Sdk:
    """The SDK of the platform that a backend is built for. InternalError if that is another platform."""
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


def _long(ends: Ints, kv_lens: Sequence[int], table: Tensor) -> tuple[Alone, ...]:
    """The rows of several queries."""
    begins = [0, *ends[:-1].tolist()]
    return tuple(
        Alone(begin, end, kv_lens[row], table[row : row + 1])
        for row, (begin, end) in enumerate(zip(begins, ends.tolist(), strict=True))
        if end - begin > 1
    )


def _check(layer: AttentionLayer, step: Step) -> None:
    """What the facts refuse before a model is loaded, looked at again where it would give wrong numbers."""
    if layer.soft_cap is not None:
        raise InternalError(f"attention layer {layer.index} caps its scores, which backend ascend cannot")
    if layer.window is not None and max(step.kv_lens) > layer.window:
        raise InternalError(f"attention layer {layer.index} has a window of {layer.window}, which ascend cannot mask")
