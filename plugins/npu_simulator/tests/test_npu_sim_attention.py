"""Fused attention compared with a float64 reference without layouts, for random shapes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

BLOCK = 128
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Row:
    """One sequence: q [queries, heads, D], k and v [keys, KV heads, D], on the host."""

    q: Tensor
    k: Tensor
    v: Tensor


def reference(row: Row, scale: float, masked: Any) -> tuple[Tensor, Tensor]:
    """Token by token and head by head, in float64. masked(i, j, queries, keys): key j is masked for query i."""
    queries, heads, _ = row.q.shape
    keys, kv_heads, value_dim = row.v.shape
    out = torch.zeros(queries, heads, value_dim, dtype=torch.float64)
    lse = torch.full((queries, heads), -math.inf, dtype=torch.float64)
    for i in range(queries):
        seen = [j for j in range(keys) if not masked(i, j, queries, keys)]
        if not seen:
            continue
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = row.k[seen, shared].double() @ row.q[i, head].double() * scale
            lse[i, head] = scores.logsumexp(0)
            out[i, head] = scores.softmax(0) @ row.v[seen, shared].double()
    return out, lse


def right_down(i: int, j: int, queries: int, keys: int) -> bool:
    return j > i + keys - queries


def nothing(i: int, j: int, queries: int, keys: int) -> bool:
    return False


def outside(before: int, after: int) -> Callable[[int, int, int, int], bool]:
    return lambda i, j, queries, keys: not -before <= j - (i + keys - queries) <= after


def random_rows(
    queries: list[int], keys: list[int], heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> list[Row]:
    return [
        Row(
            torch.randn(q, heads, dim).to(dtype),
            torch.randn(k, kv_heads, dim).to(dtype),
            torch.randn(k, kv_heads, value_dim).to(dtype),
        )
        for q, k in zip(queries, keys, strict=True)
    ]


def paged(rows: list[Row], block: int, heads_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(key cache, value cache, block table) on the device, with shuffled blocks; unused memory is NaN."""
    columns = max(-(-row.k.shape[0] // block) for row in rows) + 1
    blocks = list(range(1, len(rows) * columns + 1))
    random.Random(0).shuffle(blocks)
    table = torch.zeros(len(rows), columns, dtype=torch.int32)
    caches = []
    for name in ("k", "v"):
        first = getattr(rows[0], name)
        cache = torch.full((len(blocks) + 1, block, *first.shape[1:]), math.nan, dtype=first.dtype)
        for index, row in enumerate(rows):
            tokens = getattr(row, name)
            for column in range(-(-tokens.shape[0] // block)):
                page = blocks[index * columns + column]
                table[index, column] = page
                chunk = tokens[column * block : (column + 1) * block]
                cache[page, : chunk.shape[0]] = chunk
        caches.append(cache.transpose(1, 2).contiguous() if heads_first else cache.flatten(2))
    return caches[0].to("npu:0"), caches[1].to("npu:0"), table.to("npu:0")


def causal_mask() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu:0")


def check(actual: Tensor, rows: list[Row], scale: float, masked: Any, dtype: torch.dtype) -> None:
    """actual: [tokens, heads, D], row after row."""
    expected = torch.cat([reference(row, scale, masked)[0] for row in rows])
    torch.testing.assert_close(actual.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (192, 128), (192, 192)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_packed_sequences_over_pages(sdk: Any, dtype: torch.dtype, dim: int, value_dim: int, heads_first: bool) -> None:
    rows = random_rows([3, 1, 6], [3, 40, 150], 4, 2, dim, value_dim, dtype)
    key, value, table = paged(rows, BLOCK, heads_first)
    out, lse = sdk.npu_fused_infer_attention_score(
        torch.cat([row.q for row in rows]).to("npu:0"),
        key,
        value,
        atten_mask=causal_mask(),
        actual_seq_lengths=[3, 4, 10],
        actual_seq_lengths_kv=[3, 40, 150],
        block_table=table,
        block_size=BLOCK,
        num_heads=4,
        num_key_value_heads=2,
        scale=0.1,
        input_layout="TND",
        sparse_mode=3,
        softmax_lse_flag=True,
    )
    check(out, rows, 0.1, right_down, dtype)
    expected = torch.cat([reference(row, 0.1, right_down)[1] for row in rows])
    assert lse.dtype is torch.float32
    torch.testing.assert_close(lse.cpu()[..., 0].double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_packed_sequences_without_pages(sdk: Any, seed: int) -> None:
    chance = random.Random(seed)
    queries = [chance.randint(0, 7) for _ in range(4)] + [1]
    keys = [q + chance.randint(0, 9) for q in queries]
    rows = random_rows(queries, keys, 6, 3, 128, 128, torch.float16)
    ends = [sum(queries[: i + 1]) for i in range(5)]
    out, lse = sdk.npu_fused_infer_attention_score(
        *(torch.cat([getattr(row, name) for row in rows]).to("npu:0") for name in "qkv"),
        atten_mask=causal_mask(),
        actual_seq_lengths=torch.tensor(ends),
        actual_seq_lengths_kv=tuple(sum(keys[: i + 1]) for i in range(5)),
        num_heads=6,
        num_key_value_heads=3,
        scale=128**-0.5,
        input_layout="TND",
        sparse_mode=3,
    )
    check(out, rows, 128**-0.5, right_down, torch.float16)
    assert lse.shape == (1,)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
@pytest.mark.parametrize("seed", range(3))
def test_batches_over_pages_with_any_head_dim(sdk: Any, layout: str, seed: int) -> None:
    chance = random.Random(seed)
    batch, tokens = chance.randint(1, 3), chance.choice([1, 5])
    kv_heads = chance.choice([1, 3])
    heads, dim, dtype = kv_heads * chance.choice([1, 2, 3]), chance.choice([8, 64, 80, 256]), torch.bfloat16
    keys = [chance.randint(tokens, 300) for _ in range(batch)]
    rows = random_rows([tokens] * batch, keys, heads, kv_heads, dim, dim, dtype)
    key, value, table = paged(rows, BLOCK, heads_first=layout == "BNSD")
    query = torch.stack([row.q for row in rows])
    arranged = {"BSH": query.flatten(2), "BSND": query, "BNSD": query.transpose(1, 2).contiguous()}[layout]
    out, _ = sdk.npu_fused_infer_attention_score(
        arranged.to("npu:0"),
        key,
        value,
        atten_mask=causal_mask() if tokens > 1 else None,
        actual_seq_lengths_kv=keys,
        block_table=table,
        block_size=BLOCK,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=dim**-0.5,
        input_layout=layout,
        sparse_mode=3 if tokens > 1 else 0,
    )
    assert out.shape == arranged.shape
    actual = out.transpose(1, 2) if layout == "BNSD" else out
    check(actual.reshape(batch * tokens, heads, dim), rows, dim**-0.5, right_down, dtype)


def test_batches_without_pages_keep_to_their_lengths(sdk: Any) -> None:
    rows = random_rows([2, 4], [5, 9], 4, 4, 16, 16, torch.float16)
    query, key, value = (torch.randn(2, size, 4, 16).half() for size in (4, 9, 9))
    for index, row in enumerate(rows):
        query[index, : row.q.shape[0]], key[index, : row.k.shape[0]] = row.q, row.k
        value[index, : row.v.shape[0]] = row.v
    out, _ = sdk.npu_fused_infer_attention_score(
        query.to("npu:0"),
        key.to("npu:0"),
        value.to("npu:0"),
        atten_mask=causal_mask(),
        actual_seq_lengths=[2, 4],
        actual_seq_lengths_kv=[5, 9],
        num_heads=4,
        scale=0.25,
        input_layout="BSND",
        sparse_mode=3,
    )
    actual = torch.cat([out.cpu()[0, :2], out.cpu()[1, :4]])
    check(actual, rows, 0.25, right_down, torch.float16)


def masks(batch: int, tokens: int, keys: int) -> list[Tensor]:
    full = torch.rand(batch, tokens, keys) < 0.5
    full[..., 0] = False
    return [full, full[:, None], full[:1], full[:1][:, None], full[0]]


@pytest.mark.parametrize("shape", range(5))
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
def test_a_full_mask_hides_keys_that_are_1(sdk: Any, shape: int, dtype: torch.dtype) -> None:
    rows = random_rows([4, 4], [6, 6], 2, 1, 16, 16, torch.float16)
    mask = masks(2, 4, 6)[shape]
    out, _ = sdk.npu_fused_infer_attention_score(
        *(torch.stack([getattr(row, name) for row in rows]).to("npu:0") for name in "qkv"),
        atten_mask=mask.to(dtype).contiguous().to("npu:0"),
        num_heads=2,
        num_key_value_heads=1,
        scale=0.25,
        input_layout="BSND",
        sparse_mode=1,
    )
    mask_rows = mask.reshape(-1, 4, 6).expand(2, 4, 6)
    for index, row in enumerate(rows):
        masked = mask_rows[index]
        check(out[index], [row], 0.25, lambda i, j, _q, _k, masked=masked: bool(masked[i, j]), torch.float16)


def test_one_query_token_takes_a_mask_of_one_row_per_sequence(sdk: Any) -> None:
    rows = random_rows([1, 1], [6, 6], 2, 2, 16, 16, torch.float16)
    mask = torch.tensor([[0, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    out, _ = sdk.npu_fused_infer_attention_score(
        *(torch.stack([getattr(row, name) for row in rows]).to("npu:0") for name in "qkv"),
        atten_mask=mask.to("npu:0"),
        num_heads=2,
        scale=0.25,
        input_layout="BSND",
    )
    for index, row in enumerate(rows):
        check(out[index], [row], 0.25, lambda i, j, _q, _k, index=index: bool(mask[index, j]), torch.float16)


@pytest.mark.parametrize(
    ("options", "masked", "layouts"),
    [
        ({"sparse_mode": 2}, lambda i, j, q, k: j > i, ("BSND",)),
        ({"sparse_mode": 3}, right_down, ("BSND", "TND")),
        ({"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 0}, outside(3, 0), ("BSND",)),
        ({"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1}, outside(2, 1), ("BSND",)),
        ({"sparse_mode": 0, "atten_mask": None}, nothing, ("BSND", "TND")),
    ],
)
def test_sparse_modes(sdk: Any, options: dict[str, Any], masked: Any, layouts: tuple[str, ...]) -> None:
    rows = random_rows([5], [11], 2, 2, 128, 128, torch.float16)
    for layout in layouts:
        lead = (lambda t: t) if layout == "TND" else (lambda t: t[None])
        call = {
            "atten_mask": causal_mask(),
            "actual_seq_lengths": [5],
            "actual_seq_lengths_kv": [11],
            "num_heads": 2,
            "scale": 0.09,
            "input_layout": layout,
        }
        out, _ = sdk.npu_fused_infer_attention_score(
            *(lead(getattr(rows[0], name)).to("npu:0") for name in "qkv"), **(call | options)
        )
        check(out.reshape(5, 2, 128), rows, 0.09, masked, torch.float16)


def test_a_band_over_pages_is_aligned_with_the_last_key(sdk: Any) -> None:
    rows = random_rows([7], [300], 4, 2, 64, 64, torch.bfloat16)
    key, value, table = paged(rows, BLOCK, heads_first=False)
    out, _ = sdk.npu_fused_infer_attention_score(
        rows[0].q[None].to("npu:0"),
        key,
        value,
        atten_mask=causal_mask(),
        actual_seq_lengths=[7],
        actual_seq_lengths_kv=[300],
        block_table=table,
        block_size=BLOCK,
        num_heads=4,
        num_key_value_heads=2,
        scale=0.125,
        input_layout="BSND",
        sparse_mode=4,
        pre_tokens=129,
        next_tokens=0,
    )
    check(out[0], rows, 0.125, outside(129, 0), torch.bfloat16)


def test_a_mask_of_single_queries_covers_all_pages_of_the_table(sdk: Any) -> None:
    """Keys of the first page are hidden, as a window's decode step hides them."""
    rows = random_rows([1, 1], [130, 256], 2, 1, 64, 64, torch.float16)
    key, value, table = paged(rows, BLOCK, heads_first=False)
    hidden = torch.tensor([3, 100])
    mask = torch.arange(table.shape[1] * BLOCK) < hidden[:, None, None]
    out, _ = sdk.npu_fused_infer_attention_score(
        torch.stack([row.q.flatten(1) for row in rows]).to("npu:0"),
        key,
        value,
        atten_mask=mask.to("npu:0"),
        actual_seq_lengths_kv=[130, 256],
        block_table=table,
        block_size=BLOCK,
        num_heads=2,
        num_key_value_heads=1,
        scale=0.125,
    )
    for index, row in enumerate(rows):
        actual = out[index].reshape(1, 2, 64)
        check(actual, [row], 0.125, lambda i, j, _q, _k, index=index: j < hidden[index], torch.float16)


def test_long_rows_are_computed_in_chunks(sdk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srv_npu_simulator.operators.attention._MAX_SCORES", 50)
    rows = random_rows([9], [12], 2, 1, 128, 128, torch.float16)
    out, _ = sdk.npu_fused_infer_attention_score(
        *(getattr(rows[0], name).to("npu:0") for name in "qkv"),
        atten_mask=causal_mask(),
        actual_seq_lengths=[9],
        actual_seq_lengths_kv=[12],
        num_heads=2,
        num_key_value_heads=1,
        scale=0.09,
        input_layout="TND",
        sparse_mode=3,
    )
    check(out, rows, 0.09, right_down, torch.float16)


def test_a_sequence_without_keys_gives_zero(sdk: Any) -> None:
    rows = random_rows([1, 1], [5, 3], 2, 1, 64, 64, torch.float16)
    key, value, table = paged(rows, BLOCK, heads_first=False)
    query = torch.stack([row.q.flatten(1) for row in rows]).to("npu:0")
    out, _ = sdk.npu_fused_infer_attention_score(
        query, key, value, actual_seq_lengths_kv=[5, 0], block_table=table, block_size=BLOCK, num_heads=2,
        num_key_value_heads=1, scale=0.125,
    )  # fmt: skip
    check(out[0].reshape(1, 2, 64), rows[:1], 0.125, nothing, torch.float16)
    assert not out[1].cpu().any()


def test_out_writes_the_callers_memory_with_the_requested_workspace(sdk: Any) -> None:
    rows = random_rows([1, 1], [130, 3], 2, 1, 64, 64, torch.float16)
    key, value, table = paged(rows, BLOCK, heads_first=False)
    query = torch.stack([row.q.flatten(1) for row in rows]).to("npu:0")
    options: dict[str, Any] = {
        "actual_seq_lengths_kv": [130, 3],
        "block_table": table,
        "block_size": BLOCK,
        "num_heads": 2,
        "num_key_value_heads": 1,
        "scale": 0.125,
    }
    workspace = sdk._npu_fused_infer_attention_score_get_max_workspace(query, key, value, **options)
    out, lse = torch.empty_like(query), torch.empty(1, dtype=torch.float16, device="npu:0")
    address = out.data_ptr()
    result = sdk.npu_fused_infer_attention_score.out(query, key, value, workspace=workspace, out=[out, lse], **options)
    assert result[0] is out
    assert result[1] is lse
    assert out.data_ptr() == address
    check(out.reshape(2, 2, 64), rows, 0.125, nothing, torch.float16)
    assert workspace.dtype is torch.uint8
    longer = sdk._npu_fused_infer_attention_score_get_max_workspace(
        query, key, value, **{**options, "actual_seq_lengths_kv": [1, 1]}
    )
    assert longer.nbytes == workspace.nbytes
