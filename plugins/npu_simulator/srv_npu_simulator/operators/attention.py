"""npu_fused_infer_attention_score over host views: scores and softmax in float32, one sequence after the other.

cache [blocks, block_size, KV heads * D]  or  [blocks, KV heads, block_size, D]
token t of row b lies in block block_table[b, t // block_size], place t % block_size
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from srv_npu_simulator.operators.attention_call import UNBOUNDED, AttentionOptions, AttentionPlan, Row
from srv_npu_simulator.operators.attention_rules import NAME, plan
from srv_npu_simulator.operators.checks import Rules

# Scores that are computed at once, over all heads: 256 MiB of float32.
_SCORES = 1 << 26

_WORKSPACE_BASE = 1 << 20


def fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(attention_out, softmax_lse): shapes as the layout says; lse float32, [1] of 0 without softmax_lse_flag."""
    call = AttentionOptions(**options)
    return _attend_all(query, key, value, call, plan(query, key, value, call))


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
    """The same, into memory of the caller's."""
    call = AttentionOptions(**options)
    allowed = plan(query, key, value, call)
    rules = Rules(f"{NAME}.out")
    rules.contiguous("out[0]", attention_out)
    rules.same_dtype("out[0]", attention_out, "query", query.dtype)
    rules.shape("out[0]", attention_out, allowed.output_shape)
    if call.softmax_lse_flag:
        rules.dtype("out[1]", softmax_lse, (torch.float32,))
    rules.shape("out[1]", softmax_lse, allowed.lse_shape)
    if workspace is not None:
        needed = workspace_bytes(query, allowed)
        value_ = f"of {workspace.nbytes} bytes"
        rule = f"must have the {needed} that _{NAME}_get_max_workspace gives for this call"
        rules.that(workspace.nbytes >= needed, "workspace", value_, rule)
    attended, lse = _attend_all(query, key, value, call, allowed)
    attention_out.copy_(attended)
    softmax_lse.copy_(lse)
    return attention_out, softmax_lse


def max_workspace(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """uint8: memory that `.out` may use, enough for any lengths of keys."""
    return torch.empty(workspace_bytes(query, plan(query, key, value, AttentionOptions(**options))), dtype=torch.uint8)


def workspace_bytes(query: Tensor, allowed: AttentionPlan) -> int:
    """What a call needs. The real figure differs; what matters is that it grows with the shape."""
    tokens = query.numel() // (allowed.heads * allowed.query_dim)
    return _WORKSPACE_BASE + tokens * allowed.heads * (allowed.value_dim + 2) * 4


def _attend_all(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, allowed: AttentionPlan
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(allowed.output_shape, dtype=query.dtype)
    lse = torch.zeros(allowed.lse_shape, dtype=torch.float32)
    for sequence in allowed.rows:
        if sequence.queries == 0 or sequence.keys == 0:
            continue
        attended, sums = _attend(
            _queries(query, allowed, sequence).float(),
            _keys(key, options, allowed, sequence, allowed.query_dim).float(),
            _keys(value, options, allowed, sequence, allowed.value_dim).float(),
            options,
            allowed,
            sequence,
        )
        _queries(out, allowed, sequence).copy_(attended)
        if sums is not None:
            _sums(lse, allowed, sequence).copy_(sums)
    return out, lse


def _queries(tensor: Tensor, allowed: AttentionPlan, sequence: Row) -> Tensor:
    """A view of one sequence's rows of query or output: [queries, heads, head dim]."""
    if allowed.layout == "TND":
        return tensor[sequence.query_start : sequence.query_start + sequence.queries]
    row = tensor[sequence.index]
    if allowed.layout == "BNSD":
        return row[:, : sequence.queries].transpose(0, 1)
    if allowed.layout == "BSH":
        row = row.view(row.shape[0], allowed.heads, -1)
    return row[: sequence.queries]


def _sums(lse: Tensor, allowed: AttentionPlan, sequence: Row) -> Tensor:
    """A view of one sequence's rows of the log-sum-exp: [queries, heads]."""
    if allowed.layout == "TND":
        return lse[sequence.query_start : sequence.query_start + sequence.queries, :, 0]
    return lse[sequence.index, :, : sequence.queries, 0].transpose(0, 1)


def _keys(cache: Tensor, options: AttentionOptions, allowed: AttentionPlan, sequence: Row, size: int) -> Tensor:
    """One sequence's keys or values: [keys, KV heads, head dim]."""
    if options.block_table is not None:
        blocks = options.block_table[sequence.index, : -(-sequence.keys // options.block_size)]
        pages = cache.index_select(0, blocks)
        if cache.dim() == 4:
            pages = pages.transpose(1, 2)
        return pages.reshape(-1, allowed.kv_heads, size)[: sequence.keys]
    if allowed.layout == "TND":
        return cache[sequence.key_start : sequence.key_start + sequence.keys]
    row = cache[sequence.index]
    if allowed.layout == "BNSD":
        return row[:, : sequence.keys].transpose(0, 1)
    return row[: sequence.keys].view(sequence.keys, allowed.kv_heads, size)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, allowed: AttentionPlan, sequence: Row
) -> tuple[Tensor, Tensor | None]:
    """float32 [queries, heads, value dim], and [queries, heads] if the log-sum-exp is asked for.

    Query heads h * n .. h * n + n - 1 share KV head h, and are rows of one product.
    """
    tokens, heads, size = query.shape
    keys, kv_heads, value_dim = value.shape
    transposed, values = key.permute(1, 2, 0), value.permute(1, 0, 2)
    grouped = query.view(tokens, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
    step = max(1, _SCORES // (heads * keys))
    outs, sums = [], []
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        scores = (grouped[:, :, first:last].reshape(kv_heads, -1, size) @ transposed).mul_(options.scale)
        hidden = _hidden(options, allowed, sequence, first, last)
        if hidden is not None:
            scores.view(kv_heads, -1, last - first, keys).masked_fill_(hidden, float("-inf"))
        probabilities = scores.softmax(-1)
        if hidden is not None:
            # A query that sees no key at all gives 0.
            probabilities.nan_to_num_(0.0)
        attended = (probabilities @ values).view(heads, last - first, value_dim)
        outs.append(attended.transpose(0, 1))
        if options.softmax_lse_flag:
            sums.append(scores.logsumexp(-1).view(heads, last - first).t())
    return torch.cat(outs), torch.cat(sums) if sums else None


def _hidden(options: AttentionOptions, allowed: AttentionPlan, sequence: Row, first: int, last: int) -> Tensor | None:
    """bool [last - first, keys]: which keys the queries from `first` to `last` do not see. None: they see all."""
    mode, mask = options.sparse_mode, options.atten_mask
    if mode <= 1:
        return _full_mask(options, allowed, mask, sequence, first, last) if mask is not None else None
    # Left-up counts positions from the first key, right-down and band from the last.
    offset = 0 if mode == 2 else sequence.keys - sequence.queries
    if mode == 4:
        return _outside(sequence, first + offset, last + offset, options.pre_tokens, options.next_tokens)
    return _outside(sequence, first + offset, last + offset, UNBOUNDED, 0)


def _outside(sequence: Row, first: int, last: int, before: int, after: int) -> Tensor:
    """bool [last - first, keys]: keys more than `before` before, or `after` after, positions `first` to `last`."""
    position = torch.arange(first, last)[:, None]
    key = torch.arange(sequence.keys)
    return (key > position + after) | (key < position - before)


def _full_mask(
    options: AttentionOptions, allowed: AttentionPlan, mask: Tensor, sequence: Row, first: int, last: int
) -> Tensor:
    if mask.dim() == 2 and allowed.tokens == 1:
        hidden = mask[sequence.index : sequence.index + 1]
    else:
        masks = mask.reshape(-1, *mask.shape[-2:])
        hidden = masks[sequence.index if masks.shape[0] > 1 else 0][first:last]
    hidden = hidden[:, : sequence.keys].bool()
    if options.sparse_mode == 0 and allowed.tokens > 1:
        hidden = hidden | _outside(sequence, first, last, options.pre_tokens, options.next_tokens)
    return hidden
