"""Every violated rule raises a RuntimeError that names operator, argument, value and rule.

Each case changes one thing in a valid call.
"""
# ruff: noqa: E501 - the cases are tables: one line each

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

Case = tuple[dict[str, Any], str]


def npu(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).to("npu:0")


def integers(values: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to("npu:0")


def mask() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu:0")


def tnd() -> dict[str, Any]:
    """Two sequences of 3 and 4 queries, over pages."""
    return {
        "query": npu(7, 4, 128),
        "key": npu(6, 128, 256),
        "value": npu(6, 128, 256),
        "atten_mask": mask(),
        "actual_seq_lengths": [3, 7],
        "actual_seq_lengths_kv": [130, 4],
        "block_table": integers([[1, 2], [3, 0]]),
        "block_size": 128,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.1,
        "input_layout": "TND",
        "sparse_mode": 3,
    }


def bsnd() -> dict[str, Any]:
    """Two sequences of 3 queries, over pages."""
    return tnd() | {
        "query": npu(2, 3, 4, 64),
        "key": npu(6, 128, 128),
        "value": npu(6, 128, 128),
        "actual_seq_lengths": [3, 3],
        "input_layout": "BSND",
    }


def decode() -> dict[str, Any]:
    """Two sequences of one query, over pages, in BSH."""
    changed = {"query": npu(2, 1, 256), "input_layout": "BSH", "sparse_mode": 0, "atten_mask": None}
    return bsnd() | changed | {"actual_seq_lengths": None}


def unpaged() -> dict[str, Any]:
    return bsnd() | {"key": npu(2, 9, 2, 64), "value": npu(2, 9, 2, 64), "block_table": None, "block_size": 0,
                     "actual_seq_lengths_kv": [9, 5]}  # fmt: skip


def unpaged_tnd() -> dict[str, Any]:
    return tnd() | {"key": npu(9, 2, 128), "value": npu(9, 2, 128), "block_table": None, "block_size": 0,
                    "actual_seq_lengths_kv": [4, 9]}  # fmt: skip


BASES: dict[str, Callable[[], dict[str, Any]]] = {
    "tnd": tnd,
    "bsnd": bsnd,
    "decode": decode,
    "unpaged": unpaged,
    "unpaged_tnd": unpaged_tnd,
}


@pytest.mark.parametrize("base", BASES)
def test_the_calls_that_cases_start_from_are_allowed(sdk: Any, base: str) -> None:
    out, _ = sdk.npu_fused_infer_attention_score(**BASES[base]())
    assert not out.cpu().any()


def half_view(*shape: int) -> Tensor:
    """Not contiguous: every second row of a tensor twice as large."""
    return npu(shape[0] * 2, *shape[1:])[::2]


# base, what changes, the refusal (after the operator's name)
ATTENTION: dict[str, tuple[str, Callable[[], dict[str, Any]], str]] = {
    "query_float32": ("tnd", lambda: {"query": npu(7, 4, 128, dtype=torch.float32)}, r"query: is torch.float32, must be float16 or bfloat16 or int8"),
    "query_int8": ("tnd", lambda: {"query": npu(7, 4, 128, dtype=torch.int8)}, r"query: is torch.int8, which needs dequant_scale1"),
    "key_dtype": ("tnd", lambda: {"key": npu(6, 128, 256, dtype=torch.bfloat16)}, r"key: is torch.bfloat16, must have the dtype of query"),
    "value_dtype": ("tnd", lambda: {"value": npu(6, 128, 256, dtype=torch.int8)}, r"value: is torch.int8, must have the dtype of query"),
    "query_contiguous": ("tnd", lambda: {"query": half_view(7, 4, 128)}, r"query: is not contiguous .*must be contiguous"),
    "key_contiguous": ("tnd", lambda: {"key": half_view(6, 128, 256)}, r"key: is not contiguous"),
    "value_contiguous": ("tnd", lambda: {"value": half_view(6, 128, 256)}, r"value: is not contiguous"),
    "mask_contiguous": ("tnd", lambda: {"atten_mask": mask().t()}, r"atten_mask: is not contiguous"),
    "table_contiguous": ("tnd", lambda: {"block_table": integers([[1, 2, 3], [3, 0, 1]])[:, :2]}, r"block_table: is not contiguous"),
    "query_on_host": ("tnd", lambda: {"query": torch.zeros(7, 4, 128).half()}, r"query: is on cpu, must be on npu:0"),
    "key_on_host": ("tnd", lambda: {"key": torch.zeros(6, 128, 256).half()}, r"key: is on cpu, must be on npu:0"),
    "mask_on_host": ("tnd", lambda: {"atten_mask": mask().cpu()}, r"atten_mask: is on cpu, must be on npu:0"),
    "table_on_host": ("tnd", lambda: {"block_table": torch.zeros(2, 2, dtype=torch.int32)}, r"block_table: is on cpu, must be on npu:0"),
    "lengths_on_card": ("tnd", lambda: {"actual_seq_lengths": integers([3, 7])}, r"actual_seq_lengths: is a tensor on npu:0, must be integers on the host"),
    "kv_lengths_on_card": ("tnd", lambda: {"actual_seq_lengths_kv": integers([130, 4])}, r"actual_seq_lengths_kv: is a tensor on npu:0"),
    "kv_lengths_nested": ("tnd", lambda: {"actual_seq_lengths_kv": [[130], [4]]}, r"actual_seq_lengths_kv: is \[\[130\], \[4\]\], must be one list of integers"),
    "pse_shift": ("tnd", lambda: {"pse_shift": npu(1)}, r"pse_shift: is given, but the simulator has no reference"),
    "quant_scale2": ("tnd", lambda: {"quant_scale2": npu(1)}, r"quant_scale2: is given"),
    "antiquant_scale": ("tnd", lambda: {"antiquant_scale": npu(1)}, r"antiquant_scale: is given"),
    "key_antiquant_scale": ("tnd", lambda: {"key_antiquant_scale": npu(1)}, r"key_antiquant_scale: is given"),
    "key_shared_prefix": ("tnd", lambda: {"key_shared_prefix": npu(1)}, r"key_shared_prefix: is given"),
    "actual_shared_prefix_len": ("tnd", lambda: {"actual_shared_prefix_len": [1]}, r"actual_shared_prefix_len: is given"),
    "query_padding_size": ("tnd", lambda: {"query_padding_size": npu(1)}, r"query_padding_size: is given"),
    "key_antiquant_mode": ("tnd", lambda: {"key_antiquant_mode": 1}, r"key_antiquant_mode: is 1, must be 0"),
    "layout_unknown": ("tnd", lambda: {"input_layout": "SBH"}, r"input_layout: is 'SBH', must be one of BSH, BSND, BNSD, TND"),
    "layout_unsimulated": ("tnd", lambda: {"input_layout": "NTD_TND"}, r"input_layout: is 'NTD_TND', which the simulator has no reference"),
    "inner_precise": ("tnd", lambda: {"inner_precise": 4}, r"inner_precise: is 4, must be 0 to 3"),
    "scale_zero": ("tnd", lambda: {"scale": 0.0}, r"scale: is 0.0, must be above 0"),
    "query_dims": ("tnd", lambda: {"query": npu(7, 512)}, r"query: is of shape \(7, 512\), must have 3 dimensions"),
    "query_empty": ("tnd", lambda: {"query": npu(0, 4, 128)}, r"query: is of shape \(0, 4, 128\), must not be empty"),
    "mask_dtype": ("tnd", lambda: {"atten_mask": mask().half()}, r"atten_mask: is torch.float16, must be bool or int8 or uint8"),
    "table_dtype": ("tnd", lambda: {"block_table": integers([[1, 2], [3, 0]], torch.int64)}, r"block_table: is torch.int64, must be int32"),
    "table_dims": ("tnd", lambda: {"block_table": integers([1, 2])}, r"block_table: is of shape \(2,\), must have 2 dimensions"),
    "heads_too_many": ("bsnd", lambda: {"num_heads": 257, "num_key_value_heads": 0}, r"num_heads: is 257, must be 1 to 256"),
    "heads_mismatch": ("tnd", lambda: {"num_heads": 2}, r"num_heads: is 2, and query has shape \(7, 4, 128\), must be its dimension 1"),
    "heads_default": ("decode", lambda: {"num_heads": 3, "num_key_value_heads": 3}, r"num_heads: is 3, must divide the last dimension of query, 256"),
    "kv_heads_divide": ("tnd", lambda: {"num_key_value_heads": 3}, r"num_key_value_heads: is 3, must divide num_heads, 4"),
    "group_too_large": (
        "unpaged",
        lambda: {"query": npu(2, 3, 130, 64), "num_heads": 130, "num_key_value_heads": 2},
        r"num_key_value_heads: is 2, at most 64 query heads may share a KV head, and 65 would",
    ),
    "cache_dims_bsnd": ("bsnd", lambda: {"key": npu(6, 2, 128, 64), "value": npu(6, 2, 128, 64)}, r"key: is of shape .*a paged cache for BSND must be \[blocks, block_size, KV heads \* head dim\]"),
    "cache_width": ("bsnd", lambda: {"key": npu(6, 128, 192)}, r"key: is of shape \(6, 128, 192\), its last dimension must be 2 KV heads \* head dim 64 = 128"),
    "cache_heads": ("tnd", lambda: {"key": npu(6, 4, 128, 128), "value": npu(6, 4, 128, 128)}, r"key: is of shape .*dimension 1 must be 2 KV heads"),
    "cache_head_dim": ("tnd", lambda: {"key": npu(6, 2, 128, 64), "value": npu(6, 2, 128, 64)}, r"key: is of shape .*must have the head dim of query, 128"),
    "value_dims": ("tnd", lambda: {"value": npu(6, 2, 128, 128)}, r"value: is of shape .*must have the dimensions of key"),
    "value_blocks": ("tnd", lambda: {"value": npu(5, 128, 256)}, r"value: is of shape \(5, 128, 256\), must have shape \(6, 128, 256\): the shape of key"),
    "value_width": ("tnd", lambda: {"value": npu(6, 128, 255)}, r"value: is of shape \(6, 128, 255\), must hold whole heads"),
    "unpaged_dims": ("unpaged", lambda: {"key": npu(2, 9, 128), "value": npu(2, 9, 128)}, r"key: is of shape \(2, 9, 128\), must have 4 dimensions"),
    "tnd_head_dim": (
        "tnd",
        lambda: {"query": npu(7, 4, 64), "key": npu(6, 128, 128), "value": npu(6, 128, 128)},
        r"query: is of head dim 64 with 64 for value, TND takes head dim 128, or 192 with 128 or 192 for value",
    ),
    "head_dim_large": (
        "unpaged",
        lambda: {"query": npu(2, 3, 4, 520), "key": npu(2, 9, 2, 520), "value": npu(2, 9, 2, 520)},
        r"query: is of shape .*the head dim may be at most 512",
    ),
    "head_dim_aligned": (
        "unpaged",
        lambda: {"query": npu(2, 3, 4, 60), "key": npu(2, 9, 2, 60), "value": npu(2, 9, 2, 60)},
        r"query: is of shape .*the head dim must be a multiple of 8",
    ),
    "head_dim_batch": (
        "unpaged",
        lambda: {"query": npu(129, 3, 4, 24), "key": npu(129, 9, 2, 24), "value": npu(129, 9, 2, 24)},
        r"query: is of shape .*the batch may be at most 128",
    ),
    "value_head_dim": ("unpaged", lambda: {"value": npu(2, 9, 2, 32)}, r"value: is of shape .*must have the shape of key for layout BSND"),
    "two_lengths_bsnd": ("bsnd", lambda: {"query": npu(2, 3, 4, 192), "key": npu(6, 128, 384), "value": npu(6, 128, 256)}, r"value: is of shape .*must have the shape of key for layout BSND"),
    "two_lengths_bsh": ("decode", lambda: {"query": npu(2, 1, 768), "key": npu(6, 128, 384), "value": npu(6, 128, 256)}, r"value: is of shape .*must have the shape of key for layout BSH"),
    "two_lengths_tnd": ("tnd", lambda: {"value": npu(6, 128, 384)}, r"query: is of head dim 128 with 192 for value, TND takes"),
    "tnd_no_lengths": ("tnd", lambda: {"actual_seq_lengths": None}, r"actual_seq_lengths: is not given, must be given for TND"),
    "tnd_no_kv_lengths": ("tnd", lambda: {"actual_seq_lengths_kv": None}, r"actual_seq_lengths_kv: is not given, must be given for TND"),
    "tnd_not_cumulative": ("tnd", lambda: {"actual_seq_lengths": [4, 3]}, r"actual_seq_lengths: is \[4, 3\], must be cumulative: each entry"),
    "tnd_not_the_total": ("tnd", lambda: {"actual_seq_lengths": [3, 4]}, r"actual_seq_lengths: is \[3, 4\], must be cumulative: the last entry is the tokens of query, 7"),
    "tnd_empty": ("tnd", lambda: {"actual_seq_lengths": []}, r"actual_seq_lengths: is of 0 entries, must have 1 to 4096"),
    "tnd_too_many": ("tnd", lambda: {"query": npu(4097, 4, 128), "actual_seq_lengths": [*range(1, 4098)]}, r"actual_seq_lengths: is of 4097 entries, must have 1 to 4096"),
    "tnd_rows": ("tnd", lambda: {"actual_seq_lengths": [3, 5, 7]}, r"block_table: is of shape \(2, 2\), must have a row for each of 3 sequences"),
    "tnd_kv_count": ("tnd", lambda: {"actual_seq_lengths_kv": [130]}, r"actual_seq_lengths_kv: is \[130\], must have one length for each of 2 sequences"),
    "tnd_paged_kv_cumulative": ("tnd", lambda: {"actual_seq_lengths_kv": [130, 260]}, r"actual_seq_lengths_kv: is \[130, 260\], must be each sequence's own length \(not cumulative"),
    "tnd_kv_not_cumulative": ("unpaged_tnd", lambda: {"actual_seq_lengths_kv": [4, 5]}, r"actual_seq_lengths_kv: is \[4, 5\], must be cumulative: the last entry is the tokens of key, 9"),
    "tnd_kv_rows": ("unpaged_tnd", lambda: {"actual_seq_lengths_kv": [9]}, r"actual_seq_lengths_kv: is \[9\], must have one entry for each of 2 sequences"),
    "paged_no_kv_lengths": ("bsnd", lambda: {"actual_seq_lengths_kv": None}, r"actual_seq_lengths_kv: is not given, must be given with block_table"),
    "kv_lengths_count": ("unpaged", lambda: {"query": npu(3, 3, 4, 64), "key": npu(3, 9, 2, 64), "value": npu(3, 9, 2, 64), "actual_seq_lengths": None}, r"actual_seq_lengths_kv: is \[9, 5\], of 2 entries, must have one entry, or one for each of 3"),
    "kv_too_long": ("bsnd", lambda: {"actual_seq_lengths_kv": [257, 4]}, r"actual_seq_lengths_kv: is \[257, 4\], must be within 0 and 256"),
    "kv_negative": ("bsnd", lambda: {"actual_seq_lengths_kv": [-1, 4]}, r"actual_seq_lengths_kv: is \[-1, 4\], must be within 0"),
    "query_too_long": ("bsnd", lambda: {"actual_seq_lengths": [4, 3]}, r"actual_seq_lengths: is \[4, 3\], must be within 0 and 3, the length of query"),
    "table_rows": ("bsnd", lambda: {"block_table": integers([[1, 2]])}, r"block_table: is of shape \(1, 2\), must have 2 rows"),
    "key_batch": ("unpaged", lambda: {"key": npu(3, 9, 2, 64), "value": npu(3, 9, 2, 64)}, r"key: is of shape .*must have the batch size of query, 2"),
    "decode_too_many_keys": (
        "decode",
        lambda: {"block_table": integers([[1] * 2049] * 2), "actual_seq_lengths_kv": [262145, 1]},
        r"actual_seq_lengths_kv: is \[262145, 1\], a single query token attends to at most 262144 keys",
    ),
    "block_size_tnd": ("tnd", lambda: {"block_size": 120, "actual_seq_lengths_kv": [4, 4]}, r"block_size: is 120, must be a multiple of 16 up to 1024 for TND"),
    "block_size_prefill": ("bsnd", lambda: {"block_size": 64, "actual_seq_lengths_kv": [4, 4]}, r"block_size: is 64, must be 128, 256, 384 or 512 for several"),
    "block_size_decode": ("decode", lambda: {"block_size": 1024, "actual_seq_lengths_kv": [4, 4]}, r"block_size: is 1024, must be a multiple of 8 up to 512"),
    "block_size_missing": ("decode", lambda: {"block_size": 0, "actual_seq_lengths_kv": [0, 0]}, r"block_size: is 0, must be a multiple"),
    "block_size_of_cache": ("bsnd", lambda: {"block_size": 256}, r"block_size: is 256, and key has shape \(6, 128, 128\), must be its dimension 1"),
    "block_outside": ("tnd", lambda: {"block_table": integers([[1, 6], [3, 0]])}, r"block_table: is \[1, 6\] in row 0, must be within 0 and 5, the blocks of key"),
    "block_negative": ("tnd", lambda: {"block_table": integers([[-1, 2], [3, 0]])}, r"block_table: is \[-1, 2\] in row 0"),
    "sparse_mode": ("tnd", lambda: {"sparse_mode": 5}, r"sparse_mode: is 5, must be 0 to 4"),
    "band_tnd": ("tnd", lambda: {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 0}, r"sparse_mode: is 4, but TND takes 0 without a mask, and 3"),
    "all_mask_tnd": ("tnd", lambda: {"sparse_mode": 1}, r"sparse_mode: is 1, but TND takes 0 without a mask, and 3"),
    "band_of_nothing": ("bsnd", lambda: {"sparse_mode": 4, "pre_tokens": 1, "next_tokens": -2}, r"pre_tokens: is 1, must not be less than -next_tokens, 2"),
    "band_behind": ("bsnd", lambda: {"sparse_mode": 4, "pre_tokens": -3, "next_tokens": 9}, r"pre_tokens: is -3, must be above minus the queries of each sequence, -3"),
    "band_before": ("bsnd", lambda: {"sparse_mode": 4, "pre_tokens": 9, "next_tokens": -4}, r"next_tokens: is -4, must be above minus the keys of each sequence, -4"),
    "mask_missing": ("tnd", lambda: {"atten_mask": None}, r"atten_mask: is not given, must be the fixed 2048 x 2048 mask for sparse_mode 3"),
    "mask_size": ("tnd", lambda: {"atten_mask": npu(7, 130, dtype=torch.bool)}, r"atten_mask: is of shape \(7, 130\), must be the fixed 2048 x 2048 mask"),
    "mask_lower": ("tnd", lambda: {"atten_mask": torch.ones(2048, 2048).tril().bool().to("npu:0")}, r"atten_mask: is another matrix, must be 1 strictly above the diagonal"),
    "mask_with_diagonal": ("tnd", lambda: {"atten_mask": torch.ones(2048, 2048).triu().bool().to("npu:0")}, r"atten_mask: is another matrix"),
    "mask_missing_mode_1": ("bsnd", lambda: {"atten_mask": None, "sparse_mode": 1}, r"atten_mask: is not given, must be the full mask for sparse_mode 1"),
    "mask_tnd_full": ("tnd", lambda: {"atten_mask": npu(7, 256, dtype=torch.bool), "sparse_mode": 0}, r"atten_mask: is of shape \(7, 256\), but TND takes a mask with sparse_mode 3 only"),
    "mask_full_shape": ("bsnd", lambda: {"atten_mask": npu(3, 255, dtype=torch.bool), "sparse_mode": 0}, r"atten_mask: is of shape \(3, 255\), must have shape .*at least 256 keys"),
    "mask_one_token_shape": ("decode", lambda: {"atten_mask": npu(2, 130, dtype=torch.bool)}, r"atten_mask: is of shape \(2, 130\), must have shape \(2, keys\) with at least 256 keys"),
    "window_without_mask": ("tnd", lambda: {"atten_mask": None, "sparse_mode": 0, "pre_tokens": 9}, r"pre_tokens: is 9, with next_tokens 2147483647, but is ignored without atten_mask"),
    "window_one_token": ("decode", lambda: {"pre_tokens": 9}, r"pre_tokens: is 9, .*but is ignored for one query token"),
    "band_one_token": ("decode", lambda: {"atten_mask": mask(), "sparse_mode": 4, "pre_tokens": 9}, r"sparse_mode: is 4, but is ignored for one query token"),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_refuses(sdk: Any, case: str) -> None:
    base, change, refusal = ATTENTION[case]
    arguments = BASES[base]() | change()
    with pytest.raises(RuntimeError, match=f"^npu_fused_infer_attention_score: {refusal}"):
        sdk.npu_fused_infer_attention_score(**arguments)


def test_attention_refuses_a_scale_that_nobody_chose(sdk: Any) -> None:
    arguments = tnd()
    del arguments["scale"]
    with pytest.raises(RuntimeError, match=r"^npu_fused_infer_attention_score: scale: is not given"):
        sdk.npu_fused_infer_attention_score(**arguments)
    with pytest.raises(RuntimeError, match=r"^_npu_fused_infer_attention_score_get_max_workspace: scale: is not given"):
        sdk._npu_fused_infer_attention_score_get_max_workspace(**arguments)


def test_lengths_of_every_host_kind_are_taken(sdk: Any) -> None:
    for kind in (list, tuple, np.array, torch.tensor):
        arguments = tnd() | {"actual_seq_lengths": kind([3, 7]), "actual_seq_lengths_kv": kind([130, 4])}
        out, _ = sdk.npu_fused_infer_attention_score(**arguments)
        assert out.shape == (7, 4, 128)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (lambda: {"out": npu(2, 1, 256)}, r"out: is 'Tensor', must be \[attention_out, softmax_lse\]"),
        (lambda: {"out": [npu(2, 256), npu(1)]}, r"out\[0\]: is of shape \(2, 256\), must have shape \(2, 1, 256\)"),
        (lambda: {"out": [npu(2, 1, 256, dtype=torch.bfloat16), npu(1)]}, r"out\[0\]: is torch.bfloat16, must have"),
        (lambda: {"out": [half_view(2, 1, 256), npu(1)]}, r"out\[0\]: is not contiguous"),
        (lambda: {"out": [npu(2, 1, 256), npu(2)]}, r"out\[1\]: is of shape \(2,\), must have shape \(1,\)"),
        (
            lambda: {"out": [npu(2, 1, 256), npu(2, 4, 1, 1)], "softmax_lse_flag": True},
            r"out\[1\]: is torch.float16, mu",
        ),
        (lambda: {"out": [torch.zeros(2, 1, 256), npu(1)]}, r"attention_out: is on cpu, must be on npu:0"),
        (lambda: {"workspace": npu(16)}, r"workspace: is of 32 bytes, must have the \d+ that"),
    ],
)
def test_attention_into_given_memory_refuses(sdk: Any, changes: Any, refusal: str) -> None:
    arguments = decode() | {"out": [npu(2, 1, 256), npu(1)]}
    sdk.npu_fused_infer_attention_score.out(**arguments)
    with pytest.raises(RuntimeError, match=rf"^npu_fused_infer_attention_score\.out: {refusal}"):
        sdk.npu_fused_infer_attention_score.out(**(arguments | changes()))


def quant() -> dict[str, Any]:
    return {
        "x1": npu(3, 16, dtype=torch.int8),
        "x2": npu(16, 8, dtype=torch.int8),
        "scale": npu(8, dtype=torch.float32),
        "pertoken_scale": npu(3, dtype=torch.float32),
        "output_dtype": torch.float16,
    }


ALLOWED: dict[str, Callable[[], dict[str, Any]]] = {
    "npu_rms_norm": lambda: {"self": npu(3, 8), "gamma": npu(8)},
    "npu_add_rms_norm": lambda: {"x1": npu(3, 8), "x2": npu(3, 8), "gamma": npu(8)},
    "npu_swiglu": lambda: {"self": npu(3, 8)},
    "npu_rotary_mul": lambda: {"self": npu(2, 3, 4, 8), "r1": npu(1, 3, 1, 8), "r2": npu(1, 3, 1, 8)},
    "npu_scatter_nd_update_": lambda: {"self": npu(4, 8), "indices": integers([[1], [3]]), "updates": npu(2, 8)},
    "npu_top_k_top_p": lambda: {
        "logits": npu(2, 9),
        "p": npu(2),
        "k": integers([1, 9]),
    },
    "npu_dynamic_quant": lambda: {"input": npu(3, 8)},
    "npu_quantize": lambda: {
        "self": npu(3, 8),
        "scales": npu(1),
        "zero_points": npu(1),
        "dtype": torch.qint8,
        "axis": -1,
        "div_mode": False,
    },
    "npu_quant_matmul": quant,
    "npu_format_cast": lambda: {"input": npu(16, 16), "acl_format": 2},
}

# operator, what changes, the refusal
OTHERS: list[tuple[str, Callable[[], dict[str, Any]], str]] = [
    ("npu_rms_norm", lambda: {"self": npu(3, 8, dtype=torch.float64)}, r"self: is torch.float64, must be float16"),
    ("npu_rms_norm", lambda: {"gamma": npu(8, dtype=torch.bfloat16)}, r"gamma: is torch.bfloat16, must be float16 or float32"),
    ("npu_rms_norm", lambda: {"gamma": npu(4)}, r"gamma: is of shape \(4,\), must have shape \(8,\)"),
    ("npu_rms_norm", lambda: {"gamma": npu(1, 3, 8)}, r"gamma: is of shape \(1, 3, 8\), must have 1 to 2 dimensions"),
    ("npu_rms_norm", lambda: {"gamma": torch.zeros(8).half()}, r"gamma: is on cpu, must be on npu:0"),
    ("npu_rms_norm", lambda: {"epsilon": 0.0}, r"epsilon: is 0.0, must be above 0"),
    ("npu_rms_norm", lambda: {"self": npu(*[1] * 8, 8)}, r"self: is of shape .*must have 1 to 8 dimensions"),
    ("npu_add_rms_norm", lambda: {"x1": npu(3, 8, dtype=torch.float64)}, r"x1: is torch.float64"),
    ("npu_add_rms_norm", lambda: {"x2": npu(3, 8, dtype=torch.bfloat16)}, r"x2: is torch.bfloat16, must have the dtype of x1"),
    ("npu_add_rms_norm", lambda: {"x2": npu(1, 8)}, r"x2: is of shape \(1, 8\), must have shape \(3, 8\): .*without broadcasting"),
    ("npu_add_rms_norm", lambda: {"gamma": npu(8, dtype=torch.float32)}, r"gamma: is torch.float32, must have the dtype of x1"),
    ("npu_swiglu", lambda: {"self": npu(3, 7)}, r"self: is of shape \(3, 7\), must have an even size along dim -1"),
    ("npu_swiglu", lambda: {"self": npu(8, 3).t()}, r"self: is not contiguous"),
    ("npu_swiglu", lambda: {"dim": 2}, r"dim: is 2, must be a dimension of self"),
    ("npu_swiglu", lambda: {"self": npu(3, 8, dtype=torch.int8)}, r"self: is torch.int8, must be"),
    ("npu_swiglu", lambda: {"self": torch.zeros(3, 8)}, r"self: is on cpu, must be on npu:0"),
    ("npu_rotary_mul", lambda: {"rotary_mode": "quarter"}, r"rotary_mode: is 'quarter', must be 'half' or 'interleave'"),
    ("npu_rotary_mul", lambda: {"rotate": npu(8, 8)}, r"rotate: is given, but"),
    ("npu_rotary_mul", lambda: {"self": npu(12, 8)}, r"self: is of shape \(12, 8\), must have 3 or 4 dimensions"),
    ("npu_rotary_mul", lambda: {"self": npu(2, 3, 4, 7), "r1": npu(1, 3, 1, 7), "r2": npu(1, 3, 1, 7)}, r"self: is of shape .*its head dim must be even"),
    ("npu_rotary_mul", lambda: {"self": npu(1, 1, 1, 896), "r1": npu(1, 1, 1, 896), "r2": npu(1, 1, 1, 896)}, r"self: is of shape .*< 896"),
    ("npu_rotary_mul", lambda: {"r1": npu(1, 3, 1, 8, dtype=torch.float32)}, r"r1: is torch.float32, must have the dtype of self"),
    ("npu_rotary_mul", lambda: {"r1": npu(1, 3, 8)}, r"r1: is of shape \(1, 3, 8\), must have 4 dimensions"),
    ("npu_rotary_mul", lambda: {"r1": npu(1, 3, 1, 4)}, r"r1: is of shape \(1, 3, 1, 4\), must have the head dim of self, 8"),
    ("npu_rotary_mul", lambda: {"r2": npu(2, 3, 1, 8)}, r"r2: is of shape \(2, 3, 1, 8\), must have shape \(1, 3, 1, 8\)"),
    ("npu_rotary_mul", lambda: {"r1": npu(1, 1, 1, 8), "r2": npu(1, 1, 1, 8)}, r"r1: is of shape \(1, 1, 1, 8\) for self .*must be 1 in the dimension of the heads"),
    ("npu_rotary_mul", lambda: {"r1": npu(2, 3, 1, 8), "r2": npu(2, 3, 1, 8), "rotary_mode": "interleave"}, r"r1: is of shape \(2, 3, 1, 8\)"),
    ("npu_rotary_mul", lambda: {"self": npu(1, 3, 1000, 8)}, r"self: is of shape \(1, 3, 1000, 8\), batch and heads must be below 1000"),
    ("npu_scatter_nd_update_", lambda: {"indices": integers([1, 3])}, r"indices: is of shape \(2,\), must have at least 2 dimensions"),
    ("npu_scatter_nd_update_", lambda: {"indices": npu(2, 1)}, r"indices: is torch.float16, must be int32 or int64"),
    ("npu_scatter_nd_update_", lambda: {"indices": integers([[1, 1, 1]])}, r"indices: is of shape \(1, 3\), must have 1 to 2 entries"),
    ("npu_scatter_nd_update_", lambda: {"indices": integers([[1], [4]])}, r"indices: is \[4\] in one place, must be within 0 and \[3\]"),
    ("npu_scatter_nd_update_", lambda: {"indices": integers([[-1], [0]])}, r"indices: is \[-1\] in one place"),
    ("npu_scatter_nd_update_", lambda: {"indices": torch.zeros(2, 1, dtype=torch.int32)}, r"indices: is on cpu, must be on npu:0"),
    ("npu_scatter_nd_update_", lambda: {"updates": npu(2, 8, dtype=torch.float32)}, r"updates: is torch.float32, must have the dtype of self"),
    ("npu_scatter_nd_update_", lambda: {"updates": npu(3, 8)}, r"updates: is of shape \(3, 8\), must have shape \(2, 8\)"),
    ("npu_scatter_nd_update_", lambda: {"self": npu(4, 8, dtype=torch.float64)}, r"self: is torch.float64, must be"),
    ("npu_scatter_nd_update_", lambda: {"self": npu(*[1] * 9)}, r"self: is of shape .*must have 1 to 8 dimensions"),
    ("npu_top_k_top_p", lambda: {"logits": npu(2, 9, dtype=torch.int8)}, r"logits: is torch.int8"),
    ("npu_top_k_top_p", lambda: {"logits": npu(1, 2, 9)}, r"logits: is of shape \(1, 2, 9\), must have 2 dimensions"),
    ("npu_top_k_top_p", lambda: {"p": npu(2, dtype=torch.float32)}, r"p: is torch.float32, must have the dtype of logits"),
    ("npu_top_k_top_p", lambda: {"p": npu(3)}, r"p: is of shape \(3,\), must have shape \(2,\)"),
    ("npu_top_k_top_p", lambda: {"p": npu(2) + 2}, r"p: is \[2.0, 2.0\], must be within 0 and 1"),
    ("npu_top_k_top_p", lambda: {"k": integers([1, 9], torch.int64)}, r"k: is torch.int64, must be int32"),
    ("npu_top_k_top_p", lambda: {"k": integers([1])}, r"k: is of shape \(1,\), must have shape \(2,\)"),
    ("npu_top_k_top_p", lambda: {"k": integers([0, 9])}, r"k: is \[0, 9\], must be within 1 and 9"),
    ("npu_top_k_top_p", lambda: {"k": integers([1, 10])}, r"k: is \[1, 10\], must be within 1 and 9"),
    ("npu_top_k_top_p", lambda: {"logits": npu(2, 2000), "k": integers([1, 1025])}, r"k: is \[1, 1025\], must be within 1 and 1024"),
    ("npu_top_k_top_p", lambda: {"k": torch.ones(2, dtype=torch.int32)}, r"k: is on cpu, must be on npu:0"),
    ("npu_dynamic_quant", lambda: {"input": npu(3, 8, dtype=torch.float32)}, r"input: is torch.float32, must be float16 or bfloat16"),
    ("npu_dynamic_quant", lambda: {"input": npu(8)}, r"input: is of shape \(8,\), must have at least 2 dimensions"),
    ("npu_dynamic_quant", lambda: {"group_index": integers([1])}, r"group_index: is given"),
    ("npu_dynamic_quant", lambda: {"dst_type": torch.float16}, r"dst_type: is torch.float16, must be one of torch.int8"),
    ("npu_dynamic_quant", lambda: {"quant_mode": "pertensor"}, r"quant_mode: is 'pertensor', must be 'pertoken'"),
    ("npu_dynamic_quant", lambda: {"dst_type_max": 7.0}, r"dst_type_max: is 7.0, must be 0.0"),
    ("npu_dynamic_quant", lambda: {"smooth_scales": npu(8, dtype=torch.float32)}, r"smooth_scales: is torch.float32, must have the dtype of input"),
    ("npu_dynamic_quant", lambda: {"smooth_scales": npu(3)}, r"smooth_scales: is of shape \(3,\), must have shape \(8,\)"),
    ("npu_quantize", lambda: {"self": npu(3, 8, dtype=torch.int8)}, r"self: is torch.int8"),
    ("npu_quantize", lambda: {"dtype": torch.float16}, r"dtype: is torch.float16, must be one of torch.qint8, torch.int8"),
    ("npu_quantize", lambda: {"div_mode": True}, r"div_mode: is True, but the simulator has no reference"),
    ("npu_quantize", lambda: {"axis": 0}, r"axis: is 0, must be the last one"),
    ("npu_quantize", lambda: {"scales": npu(1, dtype=torch.int8)}, r"scales: is torch.int8, must have the dtype of self"),
    ("npu_quantize", lambda: {"scales": npu(1, dtype=torch.float32), "zero_points": npu(1, dtype=torch.float32)}, r"scales: is torch.float32, must have the dtype of self, torch.float16"),
    ("npu_quantize", lambda: {"zero_points": npu(1, dtype=torch.float32)}, r"zero_points: is torch.float32, must have the dtype of scales, torch.float16"),
    ("npu_quantize", lambda: {"zero_points": npu(8)}, r"zero_points: is of shape \(8,\), must have shape \(1,\): the shape of scales"),
    ("npu_quantize", lambda: {"zero_points": npu(3)}, r"zero_points: is of shape \(3,\), must have shape \(1,\) or \(8,\)"),
    ("npu_quant_matmul", lambda: {"x1": npu(3, 16)}, r"x1: is torch.float16, must be int8"),
    ("npu_quant_matmul", lambda: {"x2": npu(16, 8)}, r"x2: is torch.float16, must be int8"),
    ("npu_quant_matmul", lambda: {"x1": npu(16, dtype=torch.int8)}, r"x1: is of shape \(16,\), must have 2 to 6 dimensions"),
    ("npu_quant_matmul", lambda: {"x1": npu(6, 16, dtype=torch.int8)[::2]}, r"x1: is not contiguous"),
    ("npu_quant_matmul", lambda: {"x2": npu(1, 16, 8, dtype=torch.int8)}, r"x2: is of shape \(1, 16, 8\), must have 2 dimensions"),
    ("npu_quant_matmul", lambda: {"x2": npu(16, 16, dtype=torch.int8)[:, ::2]}, r"x2: is with strides \(16, 2\), must be contiguous, or the transpose"),
    ("npu_quant_matmul", lambda: {"x2": npu(8, 16, dtype=torch.int8)}, r"x2: is of shape \(8, 16\), must have the 16 rows that x1 has columns"),
    ("npu_quant_matmul", lambda: {"x1": npu(3, 65536, dtype=torch.int8), "x2": npu(65536, 8, dtype=torch.int8)}, r"x1: is of shape \(3, 65536\), its last dimension may be at most 65535"),
    ("npu_quant_matmul", lambda: {"x2": npu(16, 65536, dtype=torch.int8), "scale": npu(65536, dtype=torch.float32)}, r"x2: is of shape \(16, 65536\), its last dimension may be at most 65535"),
    ("npu_quant_matmul", lambda: {"x2": npu(65536, 16, dtype=torch.int8).t(), "scale": npu(65536, dtype=torch.float32)}, r"x2: is of shape \(16, 65536\), its last"),
    ("npu_quant_matmul", lambda: {"scale": npu(3, dtype=torch.float32)}, r"scale: is of shape \(3,\), must have shape \(1,\) or \(8,\)"),
    ("npu_quant_matmul", lambda: {"scale": npu(8, dtype=torch.bfloat16)}, r"scale: is torch.bfloat16, must be float32"),
    ("npu_quant_matmul", lambda: {"scale": npu(8, dtype=torch.bfloat16), "pertoken_scale": None}, r"scale: is torch.bfloat16, must be float32 or int64"),
    ("npu_quant_matmul", lambda: {"scale": npu(8, dtype=torch.int64), "output_dtype": torch.bfloat16}, r"scale: is torch.int64, must be float32 or bfloat16"),
    ("npu_quant_matmul", lambda: {"pertoken_scale": npu(3)}, r"pertoken_scale: is torch.float16, must be float32"),
    ("npu_quant_matmul", lambda: {"pertoken_scale": npu(3, 1, dtype=torch.float32)}, r"pertoken_scale: is of shape \(3, 1\), must have shape \(3,\)"),
    ("npu_quant_matmul", lambda: {"bias": npu(8, dtype=torch.int64)}, r"bias: is torch.int64"),
    ("npu_quant_matmul", lambda: {"bias": npu(8)}, r"bias: is torch.float16, must be int32 or float32 or bfloat16"),
    ("npu_quant_matmul", lambda: {"bias": npu(8), "output_dtype": torch.bfloat16}, r"bias: is torch.float16, must be"),
    ("npu_quant_matmul", lambda: {"bias": npu(8, dtype=torch.float32), "pertoken_scale": None}, r"bias: is torch.float32, must be int32"),
    ("npu_quant_matmul", lambda: {"bias": npu(1, dtype=torch.int32)}, r"bias: is of shape \(1,\), must have shape \(8,\)"),
    ("npu_quant_matmul", lambda: {"offset": npu(8, dtype=torch.float32)}, r"offset: is given"),
    ("npu_quant_matmul", lambda: {"output_dtype": torch.float32}, r"output_dtype: is torch.float32, must be one of"),
    ("npu_quant_matmul", lambda: {"output_dtype": None}, r"output_dtype: is None, must be float16 or bfloat16"),
    ("npu_format_cast", lambda: {"input": torch.zeros(16, 16)}, r"self: is on cpu, must be on npu:0"),
    ("npu_format_cast", lambda: {"acl_format": 3}, r"acl_format: is 3, must be 2 \(ND\) or 29 \(FRACTAL_NZ\)"),
    ("npu_format_cast", lambda: {"acl_format": 29, "input": npu(16, 16, dtype=torch.float32)}, r"self: is torch.float32, must be float16"),
    ("npu_format_cast", lambda: {"acl_format": 29, "input": npu(16)}, r"self: is of shape \(16,\), must have at least 2 dimensions"),
    ("npu_format_cast", lambda: {"acl_format": 29, "input": npu(16, 24)}, r"self: is of shape \(16, 24\), FRACTAL_NZ needs its last dimensions to be multiples of 16 and 16"),
    ("npu_format_cast", lambda: {"acl_format": 29, "input": npu(16, 16, dtype=torch.int8)}, r"self: is of shape \(16, 16\), FRACTAL_NZ .* of 16 and 32"),
]  # fmt: skip


def call(sdk: Any, operator: str, arguments: dict[str, Any]) -> Any:
    """By position where Python's own `self` would be in the way."""
    first = arguments.pop("self", None)
    function = getattr(sdk, operator)
    return function(**arguments) if first is None else function(first, **arguments)


@pytest.mark.parametrize("operator", ALLOWED)
def test_the_calls_that_other_cases_start_from_are_allowed(sdk: Any, operator: str) -> None:
    assert call(sdk, operator, ALLOWED[operator]()) is not None


@pytest.mark.parametrize("case", range(len(OTHERS)), ids=lambda case: f"{OTHERS[case][0]}-{case}")
def test_operators_refuse(sdk: Any, case: int) -> None:
    operator, change, refusal = OTHERS[case]
    arguments = ALLOWED[operator]() | change()
    with pytest.raises(RuntimeError, match=f"^{operator}: {refusal}"):
        call(sdk, operator, arguments)
