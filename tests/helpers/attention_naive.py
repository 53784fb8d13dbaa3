"""A second attention backend, as simple as possible: dense attention in float32, one row at a time.

`install` adds it to the CPU platform as a third party would: as a distribution with one entry point.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from platform_plugins import write_plugin
from torch import Tensor

from srv.models.transformers.hf_check import dense_attention
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext

NAME = "naive"
SPEC = f"""
from srv.platform.facts import BackendSpec, Requires

SPEC = BackendSpec(
    "{NAME}", 1, lambda context: Requires(), "attention_naive:NaiveAttention", kv_order="page_token_head",
    traits=("window", "soft_cap"),
)
"""


def install(folder: Path) -> None:
    """Write the distribution to `folder`, which the caller puts on the import path."""
    write_plugin(folder, NAME, SPEC, group="srv.backends.attention", entry=f"cpu.{NAME}", attribute="SPEC")


@dataclass(frozen=True)
class Row:
    """`tokens`: its slice of the token axis. `pages`, `offsets`: where its tokens [0, length) are in the pool."""

    tokens: slice
    pages: Tensor
    offsets: Tensor


class NaiveAttention:
    """Implements `srv.platform.interface.AttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        assert context.kv is not None
        self._kv = context.kv

    def supports(self, layer: AttentionLayer) -> str | None:
        return None

    def plan(self, batch: AttentionBatch) -> list[Row]:
        rows: list[Row] = []
        begin, size = 0, self._kv.layout.page_size
        for number, (queries, length) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            at = torch.arange(length)
            rows.append(Row(slice(begin, begin + queries), batch.page_table[number, at // size].long(), at % size))
            begin += queries
        return rows

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: list[Row]) -> Tensor:
        keys, values = self._kv.keys[layer.index], self._kv.values[layer.index]
        out = torch.empty_like(q)
        for row in metadata:
            new = len(q[row.tokens])
            where = row.pages[-new:], row.offsets[-new:]
            keys[where], values[where] = k[row.tokens].to(keys.dtype), v[row.tokens].to(values.dtype)
            cached = keys[row.pages, row.offsets], values[row.pages, row.offsets]
            out[row.tokens] = dense_attention(layer, q[row.tokens], *cached).to(q.dtype)
        return out
