"""Multi-head latent attention through torch_npu's fused operator, over 128-token pages of compressed vectors.

Calls with `query_rope` and `key_rope` are of two kinds, both with the layout TND. Rows of up to 16 query tokens, as in
every decode step, are absorbed; longer ones are materialised, which takes a third of the products for many queries.

    absorbed        [q · up_key, q_rope]  attends over  [c, rope]  in the pool, with the values c; then · up_value.
                    The operator takes a power of two of heads: more are added, whose queries are 0
    materialised    [q, q_rope]  attends over  [c · up_key, rope]  of each head, with the values c · up_value.
                    The operator reads no pages here. All rows attend to their own tokens in one call. What a row has in
                    the cache is read in parts, so that memory does not grow with it; their results are merged by the
                    logarithms of their sums of exponentials

    pools [pages + 1, 128, 512] and [pages + 1, 128, 64]; the operator reads them as one KV head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext
from srv.platform.layers import missing_traits
from srv.specs import LATENT, LatentDims
from srv_npu.attention import causal_mask, graphs_of, sdk_of, token_slots, write_tokens
from srv_npu.graphs import HostLengths
from srv_npu.limits import CAUSAL, LATENT_QUERIES, PACKED_ROWS, PAGE, latent_reasons
from srv_npu.step_rows import Ints

_PART = 32 * PAGE  # cached keys of a row whose keys and values of all heads exist at the same time


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Rows that attend over pages.

    tokens: int64, the indices of their tokens in the step; None if the step has no others. ends: cumulative query
    lengths. causal: a row has several query tokens. workspaces: the operator's scratch memory by number of heads, of a
    step that is captured; None otherwise.
    """

    tokens: Tensor | None
    ends: list[int]
    kv_lens: HostLengths
    table: Tensor
    causal: bool
    workspaces: dict[int, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class CachedPart:
    """Keys of a row that were cached before the step: the first `keys` tokens of `pages`, int32 [n].

    begin, end: its query tokens, among those of materialised rows.
    """

    begin: int
    end: int
    pages: Tensor
    keys: int


@dataclass(frozen=True, slots=True)
class Materialised:
    """Rows whose keys and values are computed for each head. tokens, ends: as above."""

    tokens: Tensor | None
    ends: list[int]
    cached: tuple[CachedPart, ...]


@dataclass(frozen=True, slots=True)
class LatentMetadata:
    """What one step's attention calls need. slots: as in `srv_npu.attention.AttentionMetadata`."""

    slots: Tensor
    absorbed: Absorbed | None
    materialised: Materialised | None = None


@dataclass(frozen=True, slots=True)
class _Operands:
    """Contiguous queries of a layer, [tokens, heads, 128] and their rotated part, [tokens, heads, 64]."""

    plain: Tensor
    rotated: Tensor

    def of(self, tokens: Tensor | None) -> _Operands:
        if tokens is None:
            return self
        return _Operands(self.plain.index_select(0, tokens), self.rotated.index_select(0, tokens))


@dataclass(frozen=True, slots=True)
class _Up:
    """Views of a layer's up-projection: key [heads, key_dim, latent_dim], value [heads, latent_dim, value_dim], and
    both, [heads, latent_dim, key_dim + value_dim]."""

    key: Tensor
    value: Tensor
    both: Tensor


@dataclass(slots=True)
class _Found:
    """The results of materialised rows so far: [tokens, heads, value_dim] and the log of sums, [tokens, heads, 1]."""

    out: Tensor
    log: Tensor

    def merge(self, begin: int, end: int, out: Tensor, log: Tensor) -> None:
        """Add the result of further keys to the tokens [begin, end)."""
        merged, old = self.out[begin:end], self.log[begin:end]
        merged.lerp_(out.float(), torch.sigmoid(log - old))
        old.copy_(torch.logaddexp(old, log))


class AscendLatentAttention:
    """The backend of latent attention of "ascend". Implements `srv.platform.latent.LatentAttentionBackend`."""

    def __init__(self, context: BackendContext) -> None:
        if context.kv is None:
            raise InternalError("attention backend ascend needs a KV pool, but none was allocated")
        if context.kv.layout.page_size != PAGE or context.max_rows > PACKED_ROWS:
            raise InternalError(
                f"ascend reads pages of {PAGE} tokens in steps of up to {PACKED_ROWS} rows, not pages of "
                f"{context.kv.layout.page_size} in steps of up to {context.max_rows}"
            )
        self._sdk, self._graphs = sdk_of(context), graphs_of(context)
        self._latents, self._ropes = context.kv.tensors["latent"], context.kv.tensors["rope"]
        self._mask = causal_mask(context.device)
        self._transfers = context.transfers
        self._captured: dict[int, tuple[LatentMetadata, HostLengths]] = {}
        self._up: dict[int, _Up] = {}

    def supports(self, layer: AttentionLayer) -> str | None:
        """See `srv.platform.interface.AttentionBackend`."""
        reasons = [] if layer.latent is None else latent_reasons(layer.heads, layer.latent)
        return "; ".join(reasons) or missing_traits((LATENT,), layer)

    def prepare(self, layer: AttentionLayer, up: Tensor) -> None:
        """See `srv.platform.latent.LatentAttentionBackend`. All parts are views."""
        dims = _dims(layer)
        key, value = up.split_with_sizes([dims.key_dim, dims.value_dim], 1)
        self._up[layer.index] = _Up(key, value.transpose(1, 2), up.transpose(1, 2))

    # Planning, once per step

    def plan(self, batch: AttentionBatch) -> LatentMetadata:
        """See `srv.platform.interface.AttentionBackend`."""
        queries = np.asarray(batch.query_lens, dtype=np.int64)
        kv_lens = np.asarray(batch.kv_lens, dtype=np.int64)
        table = batch.page_table.contiguous()
        slots = token_slots(self._transfers, queries, kv_lens, table)
        if batch.graph is not None:
            return self._captured_step(batch.graph, slots, kv_lens, table)
        short = queries <= LATENT_QUERIES
        absorbed = self._absorbed(queries, kv_lens, table, np.flatnonzero(short))
        materialised = self._materialised(queries, kv_lens, table, np.flatnonzero(~short))
        return LatentMetadata(slots, absorbed, materialised)

    def _captured_step(self, rows: int, slots: Tensor, kv_lens: Ints, table: Tensor) -> LatentMetadata:
        """A captured kernel reads its operands at fixed addresses: those of the first step of this size."""
        if rows not in self._captured:
            absorbed = Absorbed(None, list(range(1, rows + 1)), HostLengths([]), table, False, {})
            self._captured[rows] = LatentMetadata(slots, absorbed), absorbed.kv_lens
        step, lengths = self._captured[rows]
        step.slots.copy_(slots)
        lengths.values = kv_lens.tolist()
        return step

    def _absorbed(self, queries: Ints, kv_lens: Ints, table: Tensor, rows: Ints) -> Absorbed | None:
        if len(rows) == 0:
            return None
        tokens = None
        if len(rows) < len(queries):
            tokens = self._transfers.upload(_tokens_of(queries, rows))
            table = table.index_select(0, self._transfers.upload(rows))
        lengths_of_rows = queries[rows]
        lengths = HostLengths(kv_lens[rows].tolist())
        return Absorbed(tokens, np.cumsum(lengths_of_rows).tolist(), lengths, table, bool(lengths_of_rows.max() > 1))

    def _materialised(self, queries: Ints, kv_lens: Ints, table: Tensor, rows: Ints) -> Materialised | None:
        if len(rows) == 0:
            return None
        tokens = self._transfers.upload(_tokens_of(queries, rows)) if len(rows) < len(queries) else None
        ends: list[int] = np.cumsum(queries[rows]).tolist()
        cached: list[CachedPart] = []
        for row, begin, end in zip(rows.tolist(), [0, *ends[:-1]], ends, strict=True):
            before = int(kv_lens[row]) - (end - begin)
            for first in range(0, before, _PART):
                keys = min(_PART, before - first)
                pages = table[row, first // PAGE : -(-(first + keys) // PAGE)]
                cached.append(CachedPart(begin, end, pages, keys))
        return Materialised(tokens, ends, tuple(cached))

    # Attention, once per layer

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: LatentMetadata) -> Tensor:
        """See `srv.platform.latent.LatentAttentionBackend`."""
        dims = _dims(layer)
        write_tokens(self._sdk, self._latents[layer.index], k, metadata.slots)
        write_tokens(self._sdk, self._ropes[layer.index], v, metadata.slots)
        plain, rotated = q.split_with_sizes([dims.key_dim, dims.rope_dim], -1)
        query = _Operands(plain.contiguous(), rotated.contiguous())
        absorbed, materialised = metadata.absorbed, metadata.materialised
        if materialised is None and absorbed is not None:
            return self._attend_absorbed(layer, query, absorbed)
        assert materialised is not None
        attended = self._attend_materialised(layer, query.of(materialised.tokens), k, v, materialised)
        if materialised.tokens is None or absorbed is None or absorbed.tokens is None:
            return attended
        out = q.new_empty(q.shape[0], layer.heads, dims.value_dim)
        out.index_copy_(0, materialised.tokens, attended)
        return out.index_copy_(0, absorbed.tokens, self._attend_absorbed(layer, query.of(absorbed.tokens), absorbed))

    def _attend_absorbed(self, layer: AttentionLayer, q: _Operands, rows: Absorbed) -> Tensor:
        """[tokens, heads, value_dim]."""
        up, latents = self._up[layer.index], self._latents[layer.index]
        heads = 1 << (layer.heads - 1).bit_length()
        absorbed = torch.bmm(q.plain.transpose(0, 1), up.key).transpose(0, 1)
        query = _with_heads(absorbed, heads)
        options: dict[str, Any] = {
            **_sizes(layer, heads, 1, rows.ends, rows.kv_lens.values),
            "query_rope": _with_heads(q.rotated, heads),
            "key_rope": self._ropes[layer.index],
            "block_table": rows.table,
            "block_size": PAGE,
            **(self._causal() if rows.causal else {}),
        }
        if rows.workspaces is None:
            attended = self._sdk.npu_fused_infer_attention_score(query, latents, latents, **options)[0]
        else:
            self._graphs.attends(rows.kv_lens)
            attended = self._captured_call(query, latents, options, heads, rows.workspaces)
        return torch.bmm(attended[:, : layer.heads].transpose(0, 1), up.value).transpose(0, 1)

    def _captured_call(
        self, query: Tensor, latents: Tensor, options: dict[str, Any], heads: int, workspaces: dict[int, Tensor]
    ) -> Tensor:
        """With memory for any lengths, which a replay may bring."""
        if heads not in workspaces:
            get_workspace = self._sdk._npu_fused_infer_attention_score_get_max_workspace
            workspaces[heads] = get_workspace(query, latents, latents, **options)
        out = torch.empty_like(query)
        no_lse = torch.empty(1, dtype=torch.float32, device=query.device)  # required, but not filled
        self._sdk.npu_fused_infer_attention_score.out(
            query, latents, latents, **options, workspace=workspaces[heads], out=[out, no_lse]
        )
        return out

    def _attend_materialised(
        self, layer: AttentionLayer, q: _Operands, k: Tensor, v: Tensor, rows: Materialised
    ) -> Tensor:
        """[tokens, heads, value_dim]. k, v: the compressed vectors and rotated keys of the whole step."""
        latent, rope = k[:, 0], v[:, 0]
        if rows.tokens is not None:
            latent, rope = latent.index_select(0, rows.tokens), rope.index_select(0, rows.tokens)
        whole = self._attend_heads(layer, q, latent, rope, rows.ends, rows.ends, bool(rows.cached), **self._causal())
        if not rows.cached:
            return whole[0]
        merged = _Found(whole[0].float(), whole[1])
        latents, ropes = self._latents[layer.index], self._ropes[layer.index]
        for part in rows.cached:
            operands = _Operands(q.plain[part.begin : part.end], q.rotated[part.begin : part.end])
            keys, queries = [part.keys], [part.end - part.begin]
            latent, rope = (pool.index_select(0, part.pages).flatten(0, 1)[: part.keys] for pool in (latents, ropes))
            merged.merge(part.begin, part.end, *self._attend_heads(layer, operands, latent, rope, queries, keys, True))
        return merged.out.to(k.dtype)

    def _attend_heads(
        self,
        layer: AttentionLayer,
        q: _Operands,
        latent: Tensor,
        rope: Tensor,
        ends: list[int],
        key_ends: list[int],
        with_log: bool,
        **mask: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend over the keys and values of each head, of latent [keys, latent_dim] and rope [keys, rope_dim].

        Both lists are cumulative. Returns [tokens, heads, value_dim] and, `with_log`, float32 [tokens, heads, 1].
        """
        heads = torch.matmul(latent, self._up[layer.index].both).transpose(0, 1)  # [keys, heads, key_dim + value_dim]
        key, value = heads.split_with_sizes([_dims(layer).key_dim, _dims(layer).value_dim], -1)
        out, log = self._sdk.npu_fused_infer_attention_score(
            q.plain,
            key.contiguous(),
            value.contiguous(),
            query_rope=q.rotated,
            key_rope=rope.unsqueeze(1).expand(-1, layer.heads, -1).contiguous(),
            **_sizes(layer, layer.heads, layer.heads, ends, key_ends),
            softmax_lse_flag=with_log,
            **mask,
        )
        return out, log

    def _causal(self) -> dict[str, Any]:
        return {"atten_mask": self._mask, "sparse_mode": CAUSAL}


def _dims(layer: AttentionLayer) -> LatentDims:
    if layer.latent is None:
        raise InternalError("the ascend backend of latent attention got a layer without it")
    return layer.latent


def _sizes(layer: AttentionLayer, heads: int, kv_heads: int, ends: list[int], kv_lens: list[int]) -> dict[str, Any]:
    return {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "scale": layer.scale,
        "input_layout": "TND",
        "actual_seq_lengths": ends,
        "actual_seq_lengths_kv": kv_lens,
    }


def _tokens_of(queries: Ints, rows: Ints) -> Ints:
    """The indices of the tokens of some rows in the step."""
    starts = np.cumsum(queries) - queries
    return np.concatenate([np.arange(starts[row], starts[row] + queries[row]) for row in rows])


def _with_heads(x: Tensor, heads: int) -> Tensor:
    """x [tokens, n, dim] -> contiguous [tokens, heads, dim], with zeros after it."""
    return x.contiguous() if x.shape[1] == heads else F.pad(x, (0, 0, 0, heads - x.shape[1]))
