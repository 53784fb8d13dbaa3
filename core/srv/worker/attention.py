"""Attention for one step: one backend, or two if prefill and decode use different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from srv.platform.interface import AttentionBackend, AttentionBatch, AttentionLayer
from srv.platform.latent import LatentAttentionBackend
from srv.platform.transfers import Transfers


class PlannedAttention:
    """The `attend(layer, q, k, v)` that a model calls in each layer.

    It has the backend of each cache group, and the metadata from its `plan`.
    """

    __slots__ = ("_backends", "_metadata")

    def __init__(self, backends: Sequence[AttentionBackend], metadata: Sequence[Any]) -> None:
        self._backends = backends
        self._metadata = metadata

    def __call__(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = layer.group
        return self._backends[group].forward(layer, q, k, v, self._metadata[group])


class StepAttention(PlannedAttention):
    """Attention for one eager (not captured) step; the constructor plans it.

    page_tables: of each cache group, int32 [rows, columns] on the device. The others are those of `AttentionBatch`.
    """

    __slots__ = ()

    def __init__(
        self,
        backends: Sequence[AttentionBackend],
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_tables: Sequence[torch.Tensor],
        lengths: torch.Tensor | None = None,
    ) -> None:
        batches = [AttentionBatch(query_lens, kv_lens, table, None, lengths) for table in page_tables]
        super().__init__(backends, [backend.plan(one) for backend, one in zip(backends, batches, strict=True)])


@dataclass(frozen=True, slots=True)
class _SplitMetadata:
    decode_tokens: torch.Tensor | None
    extend_tokens: torch.Tensor | None
    decode: Any
    extend: Any


class SplitAttention:
    """Two backends over one KV pool: rows with one query token go to `decode`, longer rows to `extend`."""

    def __init__(self, extend: AttentionBackend, decode: AttentionBackend, transfers: Transfers) -> None:
        self._transfers = transfers
        self.extend = extend
        self._decode = decode

    def prepare(self, layer: AttentionLayer, up: torch.Tensor) -> None:
        for backend in (self._decode, self.extend):
            assert isinstance(backend, LatentAttentionBackend)  # of a group of latent attention, both are
            backend.prepare(layer, up)

    def supports(self, layer: AttentionLayer) -> str | None:
        return self._decode.supports(layer) or self.extend.supports(layer)

    def plan(self, batch: AttentionBatch) -> Any:
        decode_rows = [index for index, length in enumerate(batch.query_lens) if length == 1]
        extend_rows = [index for index, length in enumerate(batch.query_lens) if length > 1]
        decode, decode_tokens = self._plan_rows(self._decode, batch, decode_rows)
        extend, extend_tokens = self._plan_rows(self.extend, batch, extend_rows)
        return _SplitMetadata(decode_tokens, extend_tokens, decode, extend)

    def _plan_rows(
        self, backend: AttentionBackend, batch: AttentionBatch, rows: list[int]
    ) -> tuple[Any, torch.Tensor | None]:
        if not rows:
            return None, None
        begins = [0]
        for length in batch.query_lens:
            begins.append(begins[-1] + length)
        tokens = [token for row in rows for token in range(begins[row], begins[row + 1])]
        index = self._transfers.upload_integers(rows)
        selected = AttentionBatch(
            query_lens=[batch.query_lens[row] for row in rows],
            kv_lens=[batch.kv_lens[row] for row in rows],
            page_table=batch.page_table[index],
            lengths=None if batch.lengths is None else batch.lengths[index],
        )
        return backend.plan(selected), self._transfers.upload_integers(tokens)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], layer.result_dim(v.shape[-1]))
        for backend, tokens, plan in (
            (self._decode, metadata.decode_tokens, metadata.decode),
            (self.extend, metadata.extend_tokens, metadata.extend),
        ):
            if tokens is not None:
                out[tokens] = backend.forward(layer, q[tokens], k[tokens], v[tokens], plan)
        return out
