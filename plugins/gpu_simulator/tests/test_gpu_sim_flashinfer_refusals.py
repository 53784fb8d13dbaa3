"""What FlashInfer's wrappers refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_case import Case, int32

from srv_gpu_simulator.cards import find_card
from srv_gpu_simulator.flashinfer.planning import Problem, workspace_bytes

CASE = Case([2, 1], [5, 4])
PLAN = {
    "qo_indptr": CASE.qo_indptr,
    "paged_kv_indptr": CASE.indptr,
    "paged_kv_indices": CASE.indices,
    "paged_kv_last_page_len": CASE.last,
    "num_qo_heads": 8,
    "num_kv_heads": 2,
    "head_dim_qk": 64,
    "page_size": 4,
    "causal": True,
}
DECODE = {
    "indptr": CASE.indptr,
    "indices": CASE.indices,
    "last_page_len": CASE.last,
    "num_qo_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 4,
}


def wrapper(gpu: Any, kind: str = "Prefill", size: int = 128 << 20, **options: Any) -> Any:
    workspace = torch.empty(size, dtype=torch.uint8, device="gpusim")
    return getattr(gpu.flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")(workspace, **options)


@pytest.mark.parametrize(
    ("kind", "changed", "error", "refusal"),
    [
        ("Prefill", {"head_dim_qk": 80}, RuntimeError, r"head_dim: is \(80, 80\), must be one of \(64, 64\)"),
        ("Prefill", {"head_dim_qk": 128, "head_dim_vo": 64}, RuntimeError, r"head_dim: is \(128, 64\)"),
        ("Prefill", {"num_qo_heads": 7}, ValueError, "num_qo_heads: is 7, must be a multiple of the KV heads, 2"),
        ("Prefill", {"page_size": 0}, ValueError, "page_size: is 0, must be at least 1"),
        (
            "Prefill",
            {"q_data_type": "float32"},
            ValueError,
            "q_data_type: is torch.float32, must be float16 or bfloat16",
        ),
        (
            "Prefill",
            {"kv_data_type": "bfloat16"},
            ValueError,
            "kv_data_type: is torch.bfloat16, must be float16 or float8",
        ),
        ("Prefill", {"kv_data_type": "int8"}, ValueError, "kv_data_type: is torch.int8"),
        (
            "Prefill",
            {"paged_kv_indptr": CASE.indptr.long()},
            ValueError,
            "paged_kv_indptr: is torch.int64, must be int32",
        ),
        ("Prefill", {"paged_kv_indices": CASE.indices.long()}, ValueError, "paged_kv_indices: is torch.int64"),
        ("Prefill", {"qo_indptr": int32([0, 3])}, ValueError, r"qo_indptr: is of shape \(2,\), must have shape \(3,\)"),
        ("Prefill", {"qo_indptr": int32([0, 3, 2])}, ValueError, r"qo_indptr: is \[0, 3, 2\], must begin with 0"),
        ("Prefill", {"pos_encoding_mode": "ROPE_LLAMA"}, ValueError, "only 'NONE' is simulated"),
        ("Prefill", {"custom_mask": torch.ones(14)}, NotImplementedError, "masks are not simulated"),
        ("Prefill", {"window_left": -2}, ValueError, "window_left: is -2"),
        ("Decode", {"num_qo_heads": 10}, RuntimeError, r"num_qo_heads: is 5 times the KV heads, the decode kernel has"),
        ("Decode", {"q_len_per_req": 2}, ValueError, "q_len_per_req: is 2, needs use_tensor_cores=True"),
        ("Decode", {"fixed_split_size": 2}, ValueError, "fixed_split_size: is 2, needs use_tensor_cores=True"),
        ("Decode", {"last_page_len": int32([1])}, ValueError, r"paged_kv_indptr: is of shape \(3,\), must have shape"),
    ],
)
def test_plan_refuses(gpu: Any, kind: str, changed: Any, error: type[Exception], refusal: str) -> None:
    arguments = (PLAN if kind == "Prefill" else DECODE) | changed
    with pytest.raises(error, match=rf"^Batch{kind}WithPagedKVCacheWrapper\.plan: .*{refusal}"):
        wrapper(gpu, kind).plan(**arguments)


def test_the_constructor_refuses(gpu: Any) -> None:
    host = torch.empty(1 << 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match="float_workspace_buffer: is on cpu, must be on the GPU"):
        gpu.flashinfer.BatchPrefillWithPagedKVCacheWrapper(host)
    with pytest.raises(KeyError, match="kv_layout: is 'HDN'"):
        wrapper(gpu, kv_layout="HDN")
    with pytest.raises(ValueError, match="backend: is 'trtllm-gen', the simulator has auto, fa2, fa3"):
        wrapper(gpu, backend="trtllm-gen")


def test_a_small_workspace_is_refused(gpu: Any) -> None:
    long = Case([1, 1], [300, 200])
    small = wrapper(gpu, "Decode", 4096, use_tensor_cores=True)
    arrays = (long.indptr, long.indices, long.last)
    with pytest.raises(RuntimeError, match="float_workspace_buffer: is of 4096 bytes, this plan needs 4392960"):
        small.plan(*arrays, 8, 2, 64, 4)
    small.plan(*arrays, 8, 2, 64, 4, disable_split_kv=True)


def test_the_workspace_of_a_graph_does_not_depend_on_lengths() -> None:
    problem = Problem(
        32,
        8,
        128,
        128,
        16,
        torch.half,
        torch.half,
        torch.half,
        None,
        False,
        -1,
        0.0,
        "fa2",
        True,
        (1,) * 256,
        (1,) * 256,
    )
    longer = replace(problem, keys=(4096,) * 256)
    card = find_card("sm90")
    assert (
        workspace_bytes(problem, card, 256, True) == workspace_bytes(longer, card, 256, True) == 32 * 319 * 16 * 129 * 4
    )
    assert workspace_bytes(problem, card, None, True) == 0
    assert workspace_bytes(replace(longer, backend="fa3"), card, 256, True) == 0


@pytest.mark.parametrize(
    ("changed", "error", "refusal"),
    [
        ({"q": CASE.query}, ValueError, "q: is on cpu, must be on the GPU"),
        ({"q": CASE.query.bfloat16().to}, ValueError, "q: is torch.bfloat16, must be float16"),
        ({"q": CASE.query[:2].to}, ValueError, r"q: is of shape \(2, 8, 64\), must have shape \(3, 8, 64\)"),
        ({"paged_kv_cache": (CASE.key, CASE.value)}, ValueError, "paged_k_cache: is on cpu"),
        ({"paged_kv_cache": CASE.key.bfloat16().to}, ValueError, "paged_k_cache: is torch.bfloat16, must be float16"),
        (
            {"paged_kv_cache": CASE.key[:, :2].to},
            ValueError,
            r"paged_k_cache: is of shape .* must have shape \(\d, 4, 2, 64\)",
        ),
        ({"out": torch.empty(3, 8, 64).to}, ValueError, "out: is torch.float32, must be float16"),
        ({"window_left": 5}, AssertionError, r"window_left: is 5, must be that of plan\(\), -1"),
    ],
)
def test_run_refuses(gpu: Any, changed: Any, error: type[Exception], refusal: str) -> None:
    planned = wrapper(gpu)
    planned.plan(**PLAN)
    moved = {name: value("gpusim") if callable(value) else value for name, value in changed.items()}
    if isinstance(moved.get("paged_kv_cache"), torch.Tensor):
        moved["paged_kv_cache"] = (moved["paged_kv_cache"],) * 2
    with pytest.raises(error, match=rf"^BatchPrefillWithPagedKVCacheWrapper\.run: {refusal}"):
        planned.run(**({"q": CASE.query.to("gpusim"), "paged_kv_cache": CASE.cache()} | moved))


def test_run_needs_a_plan_and_graph_mode_in_a_capture(gpu: Any) -> None:
    query, cache = CASE.query.to("gpusim"), CASE.cache()
    eager = wrapper(gpu)
    with pytest.raises(RuntimeError, match=r"run: plan\(\) was not called"):
        eager.run(query, cache)
    eager.plan(**PLAN)
    graph = gpu.accelerator.CUDAGraph()
    with pytest.raises(RuntimeError, match="created without use_cuda_graph"), gpu.accelerator.graph(graph):
        eager.run(query, cache)
    with (
        pytest.raises(RuntimeError, match=r"plan: not permitted while a stream is being captured"),
        gpu.accelerator.graph(graph),
    ):
        eager.plan(**PLAN)


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"paged_kv_last_page_len": int32([5, 4])}, "the last page of sequence 0 has 5 tokens, not 1 to 4"),
        ({"paged_kv_indices": CASE.indices + 90}, r"sequence 0 uses pages \[\d+, \d+\], but the cache has 6"),
        ({"paged_kv_indices": CASE.indices[:2]}, "pages 2 to 3 of sequence 1 are not within 2 indices"),
    ],
)
def test_wrong_pages_are_found_when_the_kernel_runs(gpu: Any, changed: Any, refusal: str) -> None:
    planned = wrapper(gpu)
    planned.plan(**(PLAN | changed))
    with pytest.raises(RuntimeError, match=refusal):
        planned.run(CASE.query.to("gpusim"), CASE.cache())
