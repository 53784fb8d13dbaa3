"""The rules of npu_fused_infer_attention_score for multi-head latent attention: calls with query_rope and key_rope.

Scores are those of query and query_rope, one after the other, with key and key_rope.

    head dim 512   absorbed: over pages, one KV head, a power of two of query heads, few queries per sequence
    head dim 128   materialised: keys and values of each head, in no pages

Where releases of the documentation differ about queries, pages and masks, the stricter rule holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from srv_npu_simulator.operators.attention_call import AttentionOptions, Row
from srv_npu_simulator.operators.checks import Rules

ABSORBED, MATERIALISED, ROPE_DIM = 512, 128, 64
MAX_QUERIES = 16  # per sequence of an absorbed call
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


def check_ropes(rules: Rules, query: Tensor, key: Tensor, options: AttentionOptions) -> None:
    """Check what query_rope and key_rope are, and what a call with them may have besides."""
    for name, rope, like, of in (
        ("query_rope", options.query_rope, query, "query"),
        ("key_rope", options.key_rope, key, "key"),
    ):
        if rope is None:
            rules.require(False, name, "not given", "must be given together with the other rope")
            continue
        rules.contiguous(name, rope)
        rules.same_dtype(name, rope, of, like.dtype)
        rules.shape(name, rope, (*like.shape[:-1], ROPE_DIM), f"the shape of {of}, with {ROPE_DIM} elements")
    layout = options.input_layout
    rules.require(layout == "TND", "input_layout", repr(layout), "which the simulator has no reference for with ropes")
    mode = options.sparse_mode
    allowed = (mode == 0 and options.atten_mask is None) or mode == 3
    rules.require(allowed, "sparse_mode", mode, "must be 0 without a mask, or 3 with one, for calls with ropes")


def check_latent_heads(rules: Rules, options: AttentionOptions, heads: int, kv_heads: int, query_dim: int) -> None:
    """Check heads, pages and results, which depend on the head dim."""
    described = f"of head dim {query_dim}"
    known = query_dim in (ABSORBED, MATERIALISED)
    rules.require(known, "query", described, f"must be {ABSORBED} or {MATERIALISED} for calls with ropes")
    paged = options.block_table is not None
    if query_dim == MATERIALISED:
        rules.require(
            kv_heads == heads, "num_key_value_heads", kv_heads, f"must be num_heads, {heads}, for head dim 128"
        )
        rules.require(not paged, "block_table", "given", "must be left out for ropes with head dim 128")
        return
    rules.require(heads in _HEADS, "num_heads", heads, "must be a power of two up to 128 for head dim 512")
    rules.require(kv_heads == 1, "num_key_value_heads", kv_heads, "must be 1 for head dim 512")
    rules.require(paged, "block_table", "not given", "must be given for head dim 512")
    flag = options.softmax_lse_flag
    rules.require(not flag, "softmax_lse_flag", flag, "must be False for head dim 512")


def check_latent_rows(rules: Rules, options: AttentionOptions, query_dim: int, rows: Sequence[Row]) -> None:
    """Check the lengths of the sequences."""
    longest = max(row.queries for row in rows)
    mode = options.sparse_mode
    if query_dim == ABSORBED:
        rule = f"a sequence may have at most {MAX_QUERIES} queries for head dim {ABSORBED}"
        rules.require(longest <= MAX_QUERIES, "actual_seq_lengths", f"a sequence of {longest}", rule)
        fits = longest > 1 or mode == 0
        rules.require(fits, "sparse_mode", mode, "must be 0 for single queries of head dim 512")
    if mode == 3:
        short = next((row for row in rows if row.queries > row.keys), None)
        described = "" if short is None else f"{short.keys} keys for {short.queries} queries in row {short.index}"
        rules.require(short is None, "actual_seq_lengths_kv", described, "must have a key for every query")
