"""Validation of npu_fused_infer_attention_score on A2 and A3, by the rules that torch_npu documents.

The result is an `AttentionPlan`: the location of the queries and keys of each sequence. Lengths are host integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from srv_npu_simulator.operators.attention_call import AttentionOptions, AttentionPlan, Row, query_tokens
from srv_npu_simulator.operators.attention_latent import check_latent_heads, check_latent_rows, check_ropes
from srv_npu_simulator.operators.attention_masks import check_mask
from srv_npu_simulator.operators.checks import HALVES, Rules

NAME = "npu_fused_infer_attention_score"
MAX_HEADS, MAX_GROUP, MAX_HEAD_DIM, MAX_TND_ROWS, MAX_DECODE_KEYS = 256, 64, 512, 4096, 262144

_LAYOUTS = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
_OTHER_LAYOUTS = ("BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD", "NTD_TND")


def plan_call(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> AttentionPlan:
    """Validate a call. Raises RuntimeError for the first rule that it violates."""
    rules = Rules(NAME)
    _check_unsimulated(rules, query, options)
    _check_tensors(rules, query, key, value, options)
    heads, kv_heads, query_dim = _heads(rules, query, options)
    value_dim = _check_keys(rules, key, value, options, kv_heads, query_dim)
    if options.latent:
        check_ropes(rules, query, key, options)
        check_latent_heads(rules, options, heads, kv_heads, query_dim)
        rules.require(value_dim == query_dim, "value", f"of head dim {value_dim}", f"must be {query_dim}, as of query")
    else:
        _check_head_dim(rules, query, value, options.input_layout, query_dim, value_dim)
    if options.input_layout == "TND":
        sequences = _tnd_sequences(rules, query, key, options)
    else:
        sequences = _batch_sequences(rules, query, key, options)
    if options.block_table is not None:
        _check_pages(rules, key, options, sequences, query_tokens(query, options.input_layout))
    if options.latent:
        check_latent_rows(rules, options, query_dim, sequences)
    check_mask(rules, query, options, sequences)
    return AttentionPlan(
        options.input_layout,
        heads,
        kv_heads,
        query_dim,
        value_dim,
        query_tokens(query, options.input_layout),
        sequences,
        _output_shape(query, options.input_layout, heads, value_dim),
        _lse_shape(query, options, heads),
    )


class ResultSizes(NamedTuple):
    """Heads and their sizes, and the shapes of both results."""

    heads: int
    query_dim: int
    value_dim: int
    output: tuple[int, ...]
    lse: tuple[int, ...]


def result_sizes(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> ResultSizes:
    """The sizes of a call, without reading a tensor."""
    rules = Rules(NAME)
    heads, kv_heads, query_dim = _heads(rules, query, options)
    value_dim = _check_keys(rules, key, value, options, kv_heads, query_dim)
    output = _output_shape(query, options.input_layout, heads, value_dim)
    return ResultSizes(heads, query_dim, value_dim, output, _lse_shape(query, options, heads))


def _check_unsimulated(rules: Rules, query: Tensor, options: AttentionOptions) -> None:
    rules.dtype("query", query, (*HALVES, torch.int8))
    unsimulated: dict[str, Any] = {
        name: getattr(options, name)
        for name in AttentionOptions.__dataclass_fields__
        if name.endswith(("_scale", "_offset", "_prefix", "_len", "_padding_size", "_shift"))
        or name.startswith(("quant_", "dequant_"))
    }
    rules.absent(**unsimulated)
    for name in ("antiquant_mode", "key_antiquant_mode", "value_antiquant_mode"):
        mode = getattr(options, name)
        rules.require(mode == 0, name, mode, "must be 0: quantised caches are not simulated")
    rules.require(query.dtype is not torch.int8, "query", query.dtype, "which needs dequant_scale1, not given here")
    layout = options.input_layout
    rules.require(
        layout not in _OTHER_LAYOUTS, "input_layout", repr(layout), "which the simulator has no reference for"
    )
    rules.require(layout in _LAYOUTS, "input_layout", repr(layout), f"must be one of {', '.join(_LAYOUTS)}")
    rules.require(options.inner_precise in (0, 1, 2, 3), "inner_precise", options.inner_precise, "must be 0 to 3")
    rules.require(options.scale > 0, "scale", options.scale, "must be above 0, as a rule 1/sqrt(head dim)")


def _check_tensors(rules: Rules, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> None:
    rules.dims("query", query, _LAYOUTS[options.input_layout])
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        rules.contiguous(name, tensor)
        rules.same_dtype(name, tensor, "query", query.dtype)
    rules.require(query.numel() > 0, "query", f"of shape {tuple(query.shape)}", "must not be empty")
    if options.atten_mask is not None:
        rules.contiguous("atten_mask", options.atten_mask)
        rules.dtype("atten_mask", options.atten_mask, (torch.bool, torch.int8, torch.uint8))
    if options.block_table is not None:
        rules.contiguous("block_table", options.block_table)
        rules.dtype("block_table", options.block_table, (torch.int32,))
        rules.dims("block_table", options.block_table, 2)


def _heads(rules: Rules, query: Tensor, options: AttentionOptions) -> tuple[int, int, int]:
    """(query heads, KV heads, head dim of query and key)."""
    heads = options.num_heads
    rules.require(1 <= heads <= MAX_HEADS, "num_heads", heads, f"must be 1 to {MAX_HEADS}")
    kv_heads = options.num_key_value_heads or heads
    fits = 1 <= kv_heads <= heads and heads % kv_heads == 0
    rules.require(fits, "num_key_value_heads", kv_heads, f"must divide num_heads, {heads}; 0 means num_heads")
    rules.require(
        options.latent or heads // kv_heads <= MAX_GROUP,
        "num_key_value_heads",
        kv_heads,
        f"at most {MAX_GROUP} query heads may share a KV head, and {heads // kv_heads} would",
    )
    if options.input_layout == "BSH":
        width = query.shape[2]
        rules.require(width % heads == 0, "num_heads", heads, f"must divide the last dimension of query, {width}")
        return heads, kv_heads, width // heads
    axis = 2 if options.input_layout == "BSND" else 1
    described = f"{heads}, and query has shape {tuple(query.shape)}"
    rules.require(query.shape[axis] == heads, "num_heads", described, f"must be its dimension {axis}")
    return heads, kv_heads, query.shape[-1]


def _check_keys(
    rules: Rules, key: Tensor, value: Tensor, options: AttentionOptions, kv_heads: int, query_dim: int
) -> int:
    """Check the shapes of key and value; return the head dim of value."""
    layout = options.input_layout
    paged = options.block_table is not None
    described = f"of shape {tuple(key.shape)}"
    if paged:
        allowed = (3,) if layout in ("BSH", "BSND") else (3, 4)
        rule = "[blocks, block_size, KV heads * head dim]" + ("" if allowed == (3,) else " or [blocks, KV heads, ...]")
        rules.require(key.dim() in allowed, "key", described, f"a paged cache for {layout} must be {rule}")
    else:
        rules.dims("key", key, _LAYOUTS[layout])
    rules.require(
        value.dim() == key.dim(), "value", f"of shape {tuple(value.shape)}", "must have the dimensions of key"
    )
    if key.dim() == 3 and (paged or layout == "BSH"):
        rules.require(
            key.shape[2] == kv_heads * query_dim,
            "key",
            described,
            f"its last dimension must be {kv_heads} KV heads * head dim {query_dim} = {kv_heads * query_dim}",
        )
        rules.require(
            value.shape[2] % kv_heads == 0, "value", f"of shape {tuple(value.shape)}", "must hold whole heads"
        )
        value_dim = value.shape[2] // kv_heads
    else:
        axis = 2 if layout == "BSND" else 1
        rules.require(key.shape[axis] == kv_heads, "key", described, f"dimension {axis} must be {kv_heads} KV heads")
        rules.require(key.shape[-1] == query_dim, "key", described, f"must have the head dim of query, {query_dim}")
        value_dim = value.shape[-1]
    rules.shape("value", value, (*key.shape[:-1], value.shape[-1]), "the shape of key, but for the head dim")
    return value_dim


def _check_head_dim(rules: Rules, query: Tensor, value: Tensor, layout: str, query_dim: int, value_dim: int) -> None:
    described = f"of shape {tuple(query.shape)}"
    rules.require(query_dim <= MAX_HEAD_DIM, "query", described, f"the head dim may be at most {MAX_HEAD_DIM}")
    if layout == "TND":
        fits = (query_dim, value_dim) in ((128, 128), (192, 128), (192, 192))
        rule = "TND takes head dim 128, or 192 with 128 or 192 for value; use BSND one sequence at a time for another"
        rules.require(fits, "query", f"of head dim {query_dim} with {value_dim} for value", rule)
        return
    rules.require(query_dim % 8 == 0, "query", described, "the head dim must be a multiple of 8 (16 bytes)")
    fits = query_dim % 16 == 0 or query_tokens(query, layout) == 1 or query.shape[0] <= 128
    rules.require(fits, "query", described, "the batch may be at most 128 where the head dim is no multiple of 16")
    described = f"of shape {tuple(value.shape)}"
    rules.require(value_dim == query_dim, "value", described, f"must have the shape of key for layout {layout}")


def _lengths(rules: Rules, argument: str, values: Sequence[int], rows: int, limit: int, what: str) -> list[int]:
    """One length per row, from a list with one length for all rows or at least one per row."""
    rules.require(
        len(values) == 1 or len(values) >= rows,
        argument,
        f"{list(values)}, of {len(values)} entries",
        f"must have one entry, or one for each of {rows} sequences",
    )
    lengths = list(values) * rows if len(values) == 1 else list(values)[:rows]
    rules.require(all(0 <= one <= limit for one in lengths), argument, lengths, f"must be within 0 and {limit}, {what}")
    return lengths


def _batch_sequences(rules: Rules, query: Tensor, key: Tensor, options: AttentionOptions) -> tuple[Row, ...]:
    """Sequences of layouts with a batch dimension."""
    layout, table = options.input_layout, options.block_table
    rows, tokens = query.shape[0], query_tokens(query, layout)
    lengths, given_kv = options.actual_seq_lengths, options.actual_seq_lengths_kv
    queries = [tokens] * rows
    # The decode kernel does not read the lengths of queries.
    if lengths is not None and tokens > 1:
        queries = _lengths(rules, "actual_seq_lengths", lengths, rows, tokens, "the length of query")
    if table is not None:
        rules.require(table.shape[0] == rows, "block_table", f"of shape {tuple(table.shape)}", f"must have {rows} rows")
        if given_kv is None:
            rules.require(False, "actual_seq_lengths_kv", "not given", "must be given with block_table")
        limit = table.shape[1] * options.block_size
        what = "the columns of block_table * block_size"
    else:
        described = f"of shape {tuple(key.shape)}"
        rules.require(key.shape[0] == rows, "key", described, f"must have the batch size of query, {rows}")
        limit, what = key.shape[2 if layout == "BNSD" else 1], "the length of key"
    keys = [limit] * rows
    if given_kv is not None:
        keys = _lengths(rules, "actual_seq_lengths_kv", given_kv, rows, limit, what)
    if tokens == 1:
        rule = f"a single query token attends to at most {MAX_DECODE_KEYS} keys"
        rules.require(max(keys) <= MAX_DECODE_KEYS, "actual_seq_lengths_kv", keys, rule)
    return tuple(Row(row, 0, queries[row], 0, keys[row]) for row in range(rows))


def _tnd_sequences(rules: Rules, query: Tensor, key: Tensor, options: AttentionOptions) -> tuple[Row, ...]:
    """Sequences of TND: lengths of queries are cumulative, and those of keys unless there is a block table."""
    ends = _cumulative(rules, "actual_seq_lengths", options.actual_seq_lengths, query.shape[0], "query")
    rows, table = len(ends), options.block_table
    starts = [0, *ends[:-1]]
    lengths = options.actual_seq_lengths_kv
    if table is not None:
        described = f"of shape {tuple(table.shape)}"
        rules.require(table.shape[0] == rows, "block_table", described, f"must have a row for each of {rows} sequences")
        if lengths is None:
            rules.require(False, "actual_seq_lengths_kv", "not given", "must be given for TND")
        values = list(lengths or ())
        rule = f"must have one length for each of {rows} sequences"
        rules.require(len(values) == rows, "actual_seq_lengths_kv", values, rule)
        limit = table.shape[1] * options.block_size
        rule = f"must be each sequence's own length (not cumulative, with block_table), from 0 to {limit}"
        rules.require(all(0 <= one <= limit for one in values), "actual_seq_lengths_kv", values, rule)
        key_starts, keys = [0] * rows, values
    else:
        key_ends = _cumulative(rules, "actual_seq_lengths_kv", lengths, key.shape[0], "key")
        rule = f"must have one entry for each of {rows} sequences"
        rules.require(len(key_ends) == rows, "actual_seq_lengths_kv", key_ends, rule)
        key_starts = [0, *key_ends[:-1]]
        keys = [end - start for start, end in zip(key_starts, key_ends, strict=True)]
    return tuple(Row(row, starts[row], ends[row] - starts[row], key_starts[row], keys[row]) for row in range(rows))


def _cumulative(rules: Rules, argument: str, values: Sequence[int] | None, total: int, of: str) -> list[int]:
    if values is None:
        rules.require(False, argument, "not given", "must be given for TND")
    ends = list(values or ())
    rules.require(1 <= len(ends) <= MAX_TND_ROWS, argument, f"of {len(ends)} entries", f"must have 1 to {MAX_TND_ROWS}")
    rises = all(before <= after for before, after in zip([0, *ends], ends, strict=False))
    rules.require(rises, argument, ends, "must be cumulative: each entry the end of its sequence, none below the last")
    rules.require(
        ends[-1] == total, argument, ends, f"must be cumulative: the last entry is the tokens of {of}, {total}"
    )
    return ends


def _check_pages(rules: Rules, key: Tensor, options: AttentionOptions, sequences: Sequence[Row], tokens: int) -> None:
    """Check the block size, and that every block exists (the real operator does not check that)."""
    size, table = options.block_size, options.block_table
    assert table is not None
    if options.input_layout == "TND":
        allowed, rule = size % 16 == 0 and 16 <= size <= 1024, "must be a multiple of 16 up to 1024 for TND"
    elif tokens == 1:
        allowed, rule = size % 8 == 0 and 8 <= size <= 512, "must be a multiple of 8 up to 512 for one query token"
    else:
        allowed, rule = size in (128, 256, 384, 512), "must be 128, 256, 384 or 512 for several query tokens"
    rules.require(allowed, "block_size", size, rule)
    axis = 1 if key.dim() == 3 else 2
    described = f"{size}, and key has shape {tuple(key.shape)}"
    rules.require(key.shape[axis] == size, "block_size", described, f"must be its dimension {axis}")
    for sequence in sequences:
        used = table[sequence.index, : -(-sequence.keys // size)]
        outside = used.numel() > 0 and bool(((used < 0) | (used >= key.shape[0])).any())
        described = f"{used.tolist()} in row {sequence.index}" if outside else ""
        rules.require(
            not outside, "block_table", described, f"must be within 0 and {key.shape[0] - 1}, the blocks of key"
        )


def _output_shape(query: Tensor, layout: str, heads: int, value_dim: int) -> tuple[int, ...]:
    last = heads * value_dim if layout == "BSH" else value_dim
    return (*query.shape[:-1], last)


def _lse_shape(query: Tensor, options: AttentionOptions, heads: int) -> tuple[int, ...]:
    if not options.softmax_lse_flag:
        return (1,)
    if options.input_layout == "TND":
        return (query.shape[0], heads, 1)
    return (query.shape[0], heads, query_tokens(query, options.input_layout), 1)
