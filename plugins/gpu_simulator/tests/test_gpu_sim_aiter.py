"""aiter's paged attention: values against float64, captures, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from paged_case import Case

from srv_gpu_simulator.aiter import Aiter
from srv_gpu_simulator.cards import find_card
from srv_gpu_simulator.device import Accelerator


@pytest.fixture(scope="module")
def aiter(gpu: Any) -> Any:
    """aiter on this process's GPU; the architecture only decides the dtype of 8-bit floats (here e4m3fn, as gfx950)."""
    return None if gpu is None else Aiter(gpu.accelerator)


def decode_arguments(case: Case, layout: str = "NHD", cache_dtype: str = "auto", **changed: Any) -> dict[str, Any]:
    key, value = case.cache(layout)
    query = case.query.to("gpusim")
    sequences, partitions = len(case.keys), 2
    size = sequences * case.heads * partitions * (2 * 4 + case.dim * 2)
    arguments = {
        "out": torch.empty_like(query),
        "workspace_buffer": torch.empty(size, dtype=torch.uint8, device="gpusim"),
        "query": query,
        "key_cache": key,
        "value_cache": value,
        "scale": case.dim**-0.5,
        "kv_indptr": case.indptr.to("gpusim"),
        "kv_page_indices": case.indices.to("gpusim"),
        "kv_last_page_lens": case.last.to("gpusim"),
        "block_size": case.page,
        "max_num_partitions": partitions,
        "alibi_slopes": None,
        "kv_cache_dtype": cache_dtype,
        "kv_cache_layout": layout,
        "logits_soft_cap": 0.0,
        "k_scale": torch.ones(1, device="gpusim"),
        "v_scale": torch.ones(1, device="gpusim"),
    }
    return arguments | changed


@pytest.mark.parametrize(
    ("case", "layout", "cache_dtype", "cap"),
    [
        (Case([1, 1], [300, 5], page=1), "NHD", "auto", 0.0),
        (Case([1, 1, 1], [17, 0, 32], page=16, dtype=torch.bfloat16, dim=128), "HND", "auto", 3.0),
        (Case([1], [9], page=16, cache_dtype=torch.float8_e4m3fn), "NHD", "fp8_e4m3", 0.0),
    ],
    ids=["token", "pages", "fp8"],
)
def test_decode(aiter: Any, case: Case, layout: str, cache_dtype: str, cap: float) -> None:
    arguments = decode_arguments(case, layout, cache_dtype, logits_soft_cap=cap)
    out = aiter.paged_attention_ragged(**arguments)
    assert out is arguments["out"]
    tolerance = 2e-2 if case.dtype is torch.bfloat16 else 2e-3
    torch.testing.assert_close(out.cpu().double(), case.expected(cap=cap)[0], atol=tolerance, rtol=tolerance)


def test_scales_of_the_cache_are_read_by_the_kernel(gpu: Any, aiter: Any) -> None:
    case = Case([1], [9], page=16)
    scales = {"k_scale": torch.tensor([0.5]).to("gpusim"), "v_scale": torch.tensor([4.0]).to("gpusim")}
    arguments = decode_arguments(case, scale=2 * case.dim**-0.5, **scales)
    graph = gpu.accelerator.CUDAGraph()
    with gpu.accelerator.graph(graph):
        out = aiter.paged_attention_ragged(**arguments)
    scales["v_scale"].fill_(3.0)
    graph.replay()
    torch.testing.assert_close(out.cpu().double(), case.expected()[0] * 3, atol=5e-3, rtol=5e-3)


def prefill_arguments(case: Case, **changed: Any) -> dict[str, Any]:
    key, value = case.cache()
    arguments = {
        "q": case.query.to("gpusim"),
        "k": key.squeeze(1),
        "v": value.squeeze(1),
        "cu_seqlens_q": case.qo_indptr.to("gpusim"),
        "kv_indptr": case.indptr.to("gpusim"),
        "kv_page_indices": case.indices.to("gpusim"),
        "max_seqlen_q": max(case.queries),
        "max_seqlen_k": max(case.keys),
        "causal": True,
        "kv_last_page_lens": case.last.to("gpusim"),
    }
    return arguments | changed


@pytest.mark.parametrize(
    ("case", "options", "expected"),
    [
        (Case([3, 1], [5, 4], page=1, dim=128), {}, {}),
        (Case([3, 1], [20, 4], page=16, dim=128), {"window_size": (2, 0)}, {"window": 2}),
        (Case([2], [6], page=1, dim=256), {"logits_soft_cap": 2.0, "softmax_scale": 0.1}, {"cap": 2.0, "scale": 0.1}),
    ],
)
def test_prefill(aiter: Any, case: Case, options: Any, expected: Any) -> None:
    actual, lse = aiter.mha_batch_prefill_func(**prefill_arguments(case, return_lse=True, **options))
    outs, sums = case.expected(causal=True, **expected)
    torch.testing.assert_close(actual.cpu().double(), outs, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.cpu().double().t(), sums, atol=1e-3, rtol=1e-3)


SMALL = Case([1, 1], [300, 5], page=1)


@pytest.mark.parametrize(
    ("changed", "error", "refusal"),
    [
        ({"query": SMALL.query}, ValueError, "query: is on cpu"),
        ({"block_size": 4}, RuntimeError, r"block_size: is 4, must be one of \(1, 16, 32\)"),
        ({"block_size": 16}, ValueError, r"key_cache: is of shape .* must have shape \(\d+, 16, 2, 64\)"),
        ({"kv_cache_dtype": "int8"}, ValueError, "kv_cache_dtype: is 'int8'"),
        ({"kv_cache_dtype": "fp8"}, ValueError, "key_cache: is torch.float16, must be float8_e4m3fn"),
        ({"kv_cache_layout": "BNHD"}, ValueError, "kv_cache_layout: is 'BNHD'"),
        ({"kv_indptr": torch.zeros(3).long().to}, ValueError, "kv_indptr: is torch.int64, must be int32"),
        (
            {"workspace_buffer": torch.zeros(64).to},
            ValueError,
            "workspace_buffer: is of 256 bytes, must have at least 4352",
        ),
        ({"k_scale": torch.ones(1).half().to}, ValueError, "k_scale: is torch.float16, must be float32"),
        (
            {"max_num_partitions": 1},
            RuntimeError,
            r"sequence 0 has 300 tokens, but max_num_partitions \* partition_size is 256",
        ),
        ({"alibi_slopes": torch.ones(8).to}, NotImplementedError, "alibi_slopes: is given, but is not simulated"),
    ],
)
def test_decode_refuses(aiter: Any, changed: Any, error: type[Exception], refusal: str) -> None:
    moved = {name: value("gpusim") if callable(value) else value for name, value in changed.items()}
    with pytest.raises(error, match=rf"^paged_attention_ragged: {refusal}"):
        aiter.paged_attention_ragged(**decode_arguments(SMALL, **moved))


@pytest.mark.parametrize(
    ("case", "error", "refusal"),
    [
        (Case([1], [5], page=16, dim=80), RuntimeError, "head size: is 80, must be a multiple of 64"),
        (Case([1], [5], page=16, heads=34), RuntimeError, "query heads: is 17 per KV head, at most 16"),
        (Case([1], [5], page=16, dtype=torch.float32), ValueError, "query: is torch.float32"),
    ],
)
def test_decode_refuses_models(aiter: Any, case: Case, error: type[Exception], refusal: str) -> None:
    with pytest.raises(error, match=rf"^paged_attention_ragged: {refusal}"):
        aiter.paged_attention_ragged(**decode_arguments(case))


@pytest.mark.parametrize(
    ("case", "changed", "error", "refusal"),
    [
        (Case([1], [5], page=4, dim=128), {}, RuntimeError, r"k: is of 4 tokens per page, .* pages of \(1, 16, 1024\)"),
        (Case([1], [5], page=16, dim=128), {"kv_last_page_lens": None}, ValueError, "kv_last_page_lens: is not given"),
        (Case([1], [5], page=1), {}, RuntimeError, r"head size: is 64, kernels are compiled for \(128, 256\)"),
        (Case([1], [5], page=1, dim=128), {"dropout_p": 0.1}, NotImplementedError, "dropout_p: is 0.1"),
        (Case([3], [5], page=1, dim=128), {"max_seqlen_q": 2}, RuntimeError, "sequence 0 has 3 queries, 5 keys"),
        (
            Case([3], [5], page=1, dim=128, cache_dtype=torch.bfloat16),
            {},
            ValueError,
            "k: is torch.bfloat16, must be float16",
        ),
    ],
)
def test_prefill_refuses(aiter: Any, case: Case, changed: Any, error: type[Exception], refusal: str) -> None:
    with pytest.raises(error, match=rf"^mha_batch_prefill_func: {refusal}"):
        aiter.mha_batch_prefill_func(**prefill_arguments(case, **changed))


def test_gfx942_has_the_other_8_bit_format(gpu: Any) -> None:
    older = Aiter(cast(Accelerator, SimpleNamespace(card=find_card("gfx942"))))
    case = Case([1], [9], page=16, cache_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"key_cache: is torch\.float8_e4m3fn, must be float8_e4m3fnuz"):
        older.paged_attention_ragged(**decode_arguments(case, cache_dtype="fp8"))
