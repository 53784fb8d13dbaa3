"""Calls with query_rope and key_rope: their results, and their refusals, of which each changes one thing."""
# ruff: noqa: E501 - the cases are tables: one line each

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

SCALE = 192**-0.5
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def mask() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu:0")


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q [queries, heads, D], k, v [keys, KV heads, D] -> float64 [queries, heads, V], [queries, heads]."""
    sharing = q.shape[1] // k.shape[1]
    k, v = (tensor.double().repeat_interleave(sharing, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) * SCALE
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu_(1 + len(k) - len(q))
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return torch.einsum("qhk,khv->qhv", scores.softmax(-1), v), scores.logsumexp(-1)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def absorbed(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """Three sequences of 3, 1 and 16 queries over 130, 4 and 20 keys in pages."""
    latents, ropes = random(6, 128, 512, dtype=dtype), random(6, 128, 64, dtype=dtype)
    return {
        "query": random(20, 4, 512, dtype=dtype).to("npu:0"),
        "query_rope": random(20, 4, 64, dtype=dtype).to("npu:0"),
        "key": latents.to("npu:0"),
        "value": latents.to("npu:0"),
        "key_rope": ropes.to("npu:0"),
        "atten_mask": mask(),
        "sparse_mode": 3,
        "actual_seq_lengths": [3, 4, 20],
        "actual_seq_lengths_kv": [130, 4, 20],
        "block_table": torch.tensor([[1, 2], [5, 0], [3, 0]], dtype=torch.int32).to("npu:0"),
        "block_size": 128,
        "num_heads": 4,
        "num_key_value_heads": 1,
        "scale": SCALE,
        "input_layout": "TND",
    }


def decode() -> dict[str, Any]:
    """Two sequences of one query each, without a mask."""
    call = absorbed()
    return call | {
        **{name: call[name][:2].contiguous() for name in ("query", "query_rope", "block_table")},
        **{"actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": [130, 4]},
        **{"atten_mask": None, "sparse_mode": 0},
    }


def materialised(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """Two sequences of 5 and 20 queries over 9 and 20 keys, in no pages."""
    return {
        "query": random(25, 3, 128, dtype=dtype).to("npu:0"),
        "query_rope": random(25, 3, 64, dtype=dtype).to("npu:0"),
        "key": random(29, 3, 128, dtype=dtype).to("npu:0"),
        "value": random(29, 3, 128, dtype=dtype).to("npu:0"),
        "key_rope": random(29, 3, 64, dtype=dtype).to("npu:0"),
        "atten_mask": mask(),
        "sparse_mode": 3,
        "actual_seq_lengths": [5, 25],
        "actual_seq_lengths_kv": [9, 29],
        "num_heads": 3,
        "num_key_value_heads": 3,
        "scale": SCALE,
        "input_layout": "TND",
        "softmax_lse_flag": True,
    }


def host(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with their ropes."""
    on_host = {name: value.cpu() for name, value in call.items() if isinstance(value, Tensor)}
    query = torch.cat((on_host["query"], on_host["query_rope"]), -1)
    return query, torch.cat((on_host["key"], on_host["key_rope"]), -1), on_host["value"]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_absorbed_sequences_over_pages(sdk: Any, dtype: torch.dtype) -> None:
    call = absorbed(dtype)
    out, lse = sdk.npu_fused_infer_attention_score(**call)
    query, key, value = host(call)
    begin = 0
    for row, (end, keys) in enumerate(zip(call["actual_seq_lengths"], call["actual_seq_lengths_kv"], strict=True)):
        pages = call["block_table"][row].cpu()
        k, v = (tensor[pages].flatten(0, 1)[:keys].unsqueeze(1) for tensor in (key, value))
        expected, _ = reference(query[begin:end], k, v, causal=True)
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(out[begin:end].cpu().double(), expected, atol=limit, rtol=limit)
        begin = end
    assert lse.shape == (1,)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_materialised_sequences(sdk: Any, dtype: torch.dtype, causal: bool) -> None:
    call = materialised(dtype) | ({} if causal else {"atten_mask": None, "sparse_mode": 0})
    out, lse = sdk.npu_fused_infer_attention_score(**call)
    query, key, value = host(call)
    by_head = [
        reference(query[queries], key[keys], value[keys], causal)
        for queries, keys in ((slice(5), slice(9)), (slice(5, 25), slice(9, 29)))
    ]
    expected, log = (torch.cat(parts) for parts in zip(*by_head, strict=True))
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu().double(), expected, atol=limit, rtol=limit)
    torch.testing.assert_close(lse.cpu()[..., 0].double(), log, atol=1e-3, rtol=1e-3)


def npu(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).to("npu:0")


BASES: dict[str, Callable[[], dict[str, Any]]] = {"absorbed": absorbed, "decode": decode, "materialised": materialised}

# base, what changes, the refusal (after the operator's name)
REFUSED: dict[str, tuple[str, Callable[[], dict[str, Any]], str]] = {
    "no_query_rope": ("absorbed", lambda: {"query_rope": None}, r"query_rope: is not given, must be given together"),
    "no_key_rope": ("absorbed", lambda: {"key_rope": None}, r"key_rope: is not given, must be given together"),
    "rope_dim": ("absorbed", lambda: {"query_rope": npu(20, 4, 32)}, r"query_rope: is of shape \(20, 4, 32\), must have shape \(20, 4, 64\)"),
    "key_rope_blocks": ("absorbed", lambda: {"key_rope": npu(5, 128, 64)}, r"key_rope: is of shape \(5, 128, 64\), must have shape \(6, 128, 64\)"),
    "rope_dtype": ("absorbed", lambda: {"key_rope": npu(6, 128, 64, dtype=torch.bfloat16)}, r"key_rope: is torch.bfloat16, must have the dtype of key"),
    "rope_contiguous": ("absorbed", lambda: {"query_rope": npu(20, 4, 128)[..., :64]}, r"query_rope: is not contiguous"),
    "layout": ("materialised", lambda: {"input_layout": "BSND", "query": npu(1, 25, 3, 128), "key": npu(1, 29, 3, 128), "value": npu(1, 29, 3, 128), "query_rope": npu(1, 25, 3, 64), "key_rope": npu(1, 29, 3, 64)}, r"input_layout: is 'BSND', which the simulator has no reference for"),
    "band": ("absorbed", lambda: {"sparse_mode": 4}, r"sparse_mode: is 4, must be 0 without a mask, or 3 with one"),
    "heads": ("absorbed", lambda: {"num_heads": 5, "query": npu(20, 5, 512), "query_rope": npu(20, 5, 64)}, r"num_heads: is 5, must be a power of two up to 128"),
    "kv_heads": ("absorbed", lambda: {"num_key_value_heads": 2, "key": npu(6, 128, 1024), "value": npu(6, 128, 1024)}, r"num_key_value_heads: is 2, must be 1"),
    "head_dim": ("materialised", lambda: {"query": npu(25, 3, 192), "key": npu(29, 3, 192)}, r"query: is of head dim 192, must be 512 or 128"),
    "value_dim": ("materialised", lambda: {"value": npu(29, 3, 64)}, r"value: is of head dim 64, must be 128"),
    "lse": ("absorbed", lambda: {"softmax_lse_flag": True}, r"softmax_lse_flag: is True, must be False for head dim 512"),
    "too_many_queries": ("absorbed", lambda: {"actual_seq_lengths": [2, 3, 20], "actual_seq_lengths_kv": [130, 4, 20]}, r"actual_seq_lengths: is a sequence of 17, a sequence may have at most 16 queries"),
    "mask_for_one_query": ("decode", lambda: {"atten_mask": mask(), "sparse_mode": 3}, r"sparse_mode: is 3, must be 0 for single queries"),
    "fewer_keys_than_queries": ("absorbed", lambda: {"actual_seq_lengths_kv": [130, 4, 15]}, r"actual_seq_lengths_kv: is 15 keys for 16 queries in row 2"),
    "shared_kv_head": ("materialised", lambda: {"num_key_value_heads": 1, "key": npu(29, 1, 128), "value": npu(29, 1, 128), "key_rope": npu(29, 1, 64)}, r"num_key_value_heads: is 1, must be num_heads, 3"),
    "no_pages": ("absorbed", lambda: {"block_table": None, "block_size": 0, "key": npu(29, 1, 512), "value": npu(29, 1, 512), "key_rope": npu(29, 1, 64)}, r"block_table: is not given, must be given for head dim 512"),
    "pages": ("materialised", lambda: {"block_table": torch.zeros(2, 1, dtype=torch.int32).to("npu:0"), "block_size": 128, "key": npu(2, 128, 384), "value": npu(2, 128, 384), "key_rope": npu(2, 128, 64)}, r"block_table: is given, must be left out"),
}  # fmt: skip


@pytest.mark.parametrize("base", BASES)
def test_the_calls_that_cases_start_from_are_allowed(sdk: Any, base: str) -> None:
    assert sdk.npu_fused_infer_attention_score(**BASES[base]())[0].cpu().isfinite().all()


@pytest.mark.parametrize("case", REFUSED)
def test_a_violated_rule_is_named(sdk: Any, case: str) -> None:
    base, changes, refusal = REFUSED[case]
    with pytest.raises(RuntimeError, match=f"npu_fused_infer_attention_score: {refusal}"):
        sdk.npu_fused_infer_attention_score(**{**BASES[base](), **changes()})
