"""npu_fused_infer_attention_score on host views: scores and softmax in float32, one sequence after the other.

cache [blocks, block_size, KV heads * D]  or  [blocks, KV heads, block_size, D]
token t of row b is in block block_table[b, t // block_size], at position t % block_size
key_rope has the axes of key; with it, scores are those of [query, query_rope] and [key, key_rope]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from srv_npu_simulator.operators.attention_call import UNBOUNDED, AttentionOptions, AttentionPlan, Row
from srv_npu_simulator.operators.attention_latent import ROPE_DIM
from srv_npu_simulator.operators.attention_rules import NAME, ResultSizes, plan_call, result_sizes
from srv_npu_simulator.operators.checks import Rules

# The number of scores computed at once, over all heads: 256 MiB of float32.
_MAX_SCORES = 1 << 26

_WORKSPACE_BASE = 1 << 20


def fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(attention_out, softmax_lse): shapes depend on the layout; lse is float32, [1] of 0 without softmax_lse_flag."""
    call = AttentionOptions(**options)
    return _attend_all(query, key, value, call, plan_call(query, key, value, call))


def fused_infer_attention_score_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace: Tensor | None = None,
    attention_out: Tensor,
    softmax_lse: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The same, written to memory of the caller."""
    call = AttentionOptions(**options)
    planned = plan_call(query, key, value, call)
    rules = Rules(f"{NAME}.out")
    rules.contiguous("out[0]", attention_out)
    rules.same_dtype("out[0]", attention_out, "query", query.dtype)
    rules.shape("out[0]", attention_out, planned.output_shape)
    if call.softmax_lse_flag:
        rules.dtype("out[1]", softmax_lse, (torch.float32,))
    rules.shape("out[1]", softmax_lse, planned.lse_shape)
    if workspace is not None:
        needed = workspace_bytes(query, planned)
        described = f"of {workspace.nbytes} bytes"
        rule = f"must have the {needed} that _{NAME}_get_max_workspace gives for this call"
        rules.require(workspace.nbytes >= needed, "workspace", described, rule)
    attended, lse = _attend_all(query, key, value, call, planned)
    attention_out.copy_(attended)
    softmax_lse.copy_(lse)
    return attention_out, softmax_lse


def results_like(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Tensors like the results, on the device of the query."""
    sizes = result_sizes(query, key, value, AttentionOptions(**options))
    return query.new_empty(sizes.output), query.new_empty(sizes.lse, dtype=torch.float32)


def workspace_like(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """A tensor like the result of `max_workspace`, on the device of the query."""
    sizes = result_sizes(query, key, value, AttentionOptions(**options))
    return query.new_empty(workspace_bytes(query, sizes), dtype=torch.uint8)


def max_workspace(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """uint8: a workspace for `.out`, large enough for any lengths of keys."""
    return torch.empty(
        workspace_bytes(query, plan_call(query, key, value, AttentionOptions(**options))), dtype=torch.uint8
    )


def workspace_bytes(query: Tensor, planned: AttentionPlan | ResultSizes) -> int:
    """The workspace of a call. The real size differs, but grows with the shape too."""
    tokens = query.numel() // (planned.heads * planned.query_dim)
    return _WORKSPACE_BASE + tokens * planned.heads * (planned.value_dim + 2) * 4


def _attend_all(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, planned: AttentionPlan
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(planned.output_shape, dtype=query.dtype)
    lse = torch.zeros(planned.lse_shape, dtype=torch.float32)
    for sequence in planned.rows:
        if sequence.queries == 0 or sequence.keys == 0:
            continue
        queries = _queries(query, planned, sequence)
        keys = _keys(key, options, planned, sequence, planned.query_dim)
        if options.query_rope is not None and options.key_rope is not None:
            rope = _keys(options.key_rope, options, planned, sequence, ROPE_DIM)
            keys = torch.cat((keys, rope), -1)
            queries = torch.cat((queries, _queries(options.query_rope, planned, sequence)), -1)
        attended, lse_rows = _attend(
            queries.float(),
            keys.float(),
            _keys(value, options, planned, sequence, planned.value_dim).float(),
            options,
            planned,
            sequence,
        )
        _queries(out, planned, sequence).copy_(attended)
        if lse_rows is not None:
            _lse_rows(lse, planned, sequence).copy_(lse_rows)
    return out, lse


def _queries(tensor: Tensor, planned: AttentionPlan, sequence: Row) -> Tensor:
    """A view of one sequence's rows of query or output: [queries, heads, head dim]."""
    if planned.layout == "TND":
        return tensor[sequence.query_start : sequence.query_start + sequence.queries]
    row = tensor[sequence.index]
    if planned.layout == "BNSD":
        return row[:, : sequence.queries].transpose(0, 1)
    if planned.layout == "BSH":
        row = row.view(row.shape[0], planned.heads, -1)
    return row[: sequence.queries]


def _lse_rows(lse: Tensor, planned: AttentionPlan, sequence: Row) -> Tensor:
    """A view of one sequence's rows of the log-sum-exp: [queries, heads]."""
    if planned.layout == "TND":
        return lse[sequence.query_start : sequence.query_start + sequence.queries, :, 0]
    return lse[sequence.index, :, : sequence.queries, 0].transpose(0, 1)


def _keys(cache: Tensor, options: AttentionOptions, planned: AttentionPlan, sequence: Row, size: int) -> Tensor:
    """One sequence's keys or values: [keys, KV heads, head dim]."""
    if options.block_table is not None:
        blocks = options.block_table[sequence.index, : -(-sequence.keys // options.block_size)]
        pages = cache.index_select(0, blocks)
        if cache.dim() == 4:
            pages = pages.transpose(1, 2)
        return pages.reshape(-1, planned.kv_heads, size)[: sequence.keys]
    if planned.layout == "TND":
        return cache[sequence.key_start : sequence.key_start + sequence.keys]
    row = cache[sequence.index]
    if planned.layout == "BNSD":
        return row[:, : sequence.keys].transpose(0, 1)
    return row[: sequence.keys].view(sequence.keys, planned.kv_heads, size)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, planned: AttentionPlan, sequence: Row
) -> tuple[Tensor, Tensor | None]:
    """float32 [queries, heads, value dim], and [queries, heads] if the log-sum-exp is requested.

    Query heads h * n .. h * n + n - 1 share KV head h and are rows of one matrix product.
    """
    tokens, heads, size = query.shape
    keys, kv_heads, value_dim = value.shape
    transposed, values = key.permute(1, 2, 0), value.permute(1, 0, 2)
    grouped = query.view(tokens, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
    chunk = max(1, _MAX_SCORES // (heads * keys))
    outs, lse_rows = [], []
    for first in range(0, tokens, chunk):
        last = min(first + chunk, tokens)
        scores = (grouped[:, :, first:last].reshape(kv_heads, -1, size) @ transposed).mul_(options.scale)
        masked = _masked(options, planned, sequence, first, last)
        if masked is not None:
            scores.view(kv_heads, -1, last - first, keys).masked_fill_(masked, float("-inf"))
        probabilities = scores.softmax(-1)
        if masked is not None:
            # The result of a query that attends to no key is 0.
            probabilities.nan_to_num_(0.0)
        attended = (probabilities @ values).view(heads, last - first, value_dim)
        outs.append(attended.transpose(0, 1))
        if options.softmax_lse_flag:
            lse_rows.append(scores.logsumexp(-1).view(heads, last - first).t())
    return torch.cat(outs), torch.cat(lse_rows) if lse_rows else None


def _masked(options: AttentionOptions, planned: AttentionPlan, sequence: Row, first: int, last: int) -> Tensor | None:
    """bool [last - first, keys]: the masked keys of the queries from `first` to `last`. None: no key is masked."""
    mode, mask = options.sparse_mode, options.atten_mask
    if mode <= 1:
        return _full_mask(options, planned, mask, sequence, first, last) if mask is not None else None
    # Left-up (2) aligns queries with the first keys, right-down (3) and band (4) with the last keys.
    offset = 0 if mode == 2 else sequence.keys - sequence.queries
    if mode == 4:
        return _outside_band(sequence, first + offset, last + offset, options.pre_tokens, options.next_tokens)
    return _outside_band(sequence, first + offset, last + offset, UNBOUNDED, 0)


def _outside_band(sequence: Row, first: int, last: int, before: int, after: int) -> Tensor:
    """bool [last - first, keys]: keys more than `before` before, or `after` after, positions `first` to `last`."""
    position = torch.arange(first, last)[:, None]
    key = torch.arange(sequence.keys)
    return (key > position + after) | (key < position - before)


def _full_mask(
    options: AttentionOptions, planned: AttentionPlan, mask: Tensor, sequence: Row, first: int, last: int
) -> Tensor:
    if mask.dim() == 2 and planned.tokens == 1:
        masked = mask[sequence.index : sequence.index + 1]
    else:
        masks = mask.reshape(-1, *mask.shape[-2:])
        masked = masks[sequence.index if masks.shape[0] > 1 else 0][first:last]
    masked = masked[:, : sequence.keys].bool()
    if options.sparse_mode == 0 and planned.tokens > 1:
        masked = masked | _outside_band(sequence, first, last, options.pre_tokens, options.next_tokens)
    return masked
