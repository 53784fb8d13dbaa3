"""FlashInfer's paged attention: values against float64, graph mode, the race of two plans, appended keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged_case import Case, ends, int32
from torch import Tensor

MIB = 1 << 20


def workspace() -> Tensor:
    return torch.zeros(128 * MIB, dtype=torch.uint8, device="gpusim")


def prefill(gpu: Any, case: Case, layout: str = "NHD", **options: Any) -> Any:
    wrapper = gpu.flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), layout)
    plan(wrapper, case, **options)
    return wrapper


def plan(wrapper: Any, case: Case, **options: Any) -> None:
    options = {"q_data_type": case.dtype, "kv_data_type": case.cache_dtype, **options}
    sizes = (case.heads, case.kv_heads, case.dim, case.page)
    arrays = (case.indptr, case.indices, case.last)
    if "Decode" in wrapper.kind:
        wrapper.plan(*arrays, *sizes, **options)
    else:
        wrapper.plan(case.qo_indptr, *arrays, *sizes, **options)


@pytest.mark.parametrize(
    ("case", "options", "expected"),
    [
        (Case([3, 1, 5], [3, 9, 8]), {}, {}),
        (Case([3, 1, 5], [3, 9, 8]), {"causal": True}, {"causal": True}),
        (Case([4], [11]), {"causal": True, "window_left": 3}, {"causal": True, "window": 3}),
        (Case([4], [11]), {"window_left": 0}, {"window": 0}),
        (Case([2], [6], dim=128), {"causal": True, "logits_soft_cap": 2.0}, {"causal": True, "cap": 2.0}),
        (Case([2, 2], [2, 3], page=1, kv_heads=8, dtype=torch.bfloat16), {"sm_scale": 0.5}, {"scale": 0.5}),
        (Case([2, 1], [5, 0], cache_dtype=torch.float8_e4m3fn), {"causal": True}, {"causal": True}),
    ],
    ids=["all", "causal", "window", "own", "cap", "scale", "fp8"],
)
def test_prefill(gpu: Any, case: Case, options: Any, expected: Any) -> None:
    wrapper = prefill(gpu, case, **options)
    actual, lse = wrapper.run(case.query.to("gpusim"), case.cache(), return_lse=True)
    outs, sums = case.expected(**expected)
    assert actual.dtype is case.dtype
    tolerance = 2e-2 if case.dtype is torch.bfloat16 else 2e-3
    torch.testing.assert_close(actual.cpu().double(), outs, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu().double() * math.log(2), sums, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joint", [False, True])
def test_layouts_of_the_cache_and_scales(gpu: Any, layout: str, joint: bool) -> None:
    case = Case([2, 1], [6, 3], page=2)
    wrapper = prefill(gpu, case, layout, causal=True)
    out = torch.empty(3, 8, 64, dtype=torch.float16, device="gpusim")
    options = {"q_scale": 2.0, "k_scale": 0.5, "v_scale": 3.0, "out": out}
    assert wrapper.run(case.query.to("gpusim"), case.cache(layout, joint), **options) is out
    torch.testing.assert_close(out.cpu().double(), case.expected(causal=True)[0] * 3, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_decode(gpu: Any, tensor_cores: bool) -> None:
    case = Case([1, 1, 1], [5, 0, 200])
    wrapper = gpu.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=tensor_cores)
    plan(wrapper, case)
    actual = wrapper.run(case.query.to("gpusim"), case.cache())
    torch.testing.assert_close(actual.cpu().double(), case.expected()[0], atol=2e-3, rtol=2e-3)
    assert actual[1].count_nonzero() == 0


def test_decode_of_several_tokens_is_causal(gpu: Any) -> None:
    case = Case([2, 2], [5, 9])
    wrapper = gpu.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    plan(wrapper, case, q_len_per_req=2)
    actual = wrapper.run(case.query.to("gpusim"), case.cache())
    torch.testing.assert_close(actual.cpu().double(), case.expected(causal=True)[0], atol=2e-3, rtol=2e-3)


class Fixed:
    """A decode wrapper in graph mode, with its buffers and a captured run."""

    def __init__(self, gpu: Any, case: Case) -> None:
        buffers = {
            "paged_kv_indptr_buffer": torch.zeros(len(case.keys) + 1, dtype=torch.int32, device="gpusim"),
            "paged_kv_indices_buffer": torch.zeros(64, dtype=torch.int32, device="gpusim"),
            "paged_kv_last_page_len_buffer": torch.zeros(len(case.keys), dtype=torch.int32, device="gpusim"),
        }
        self.wrapper = gpu.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, **buffers)
        self.query, self.cache = case.query.to("gpusim"), case.cache()
        plan(self.wrapper, case)
        self.graph = gpu.accelerator.CUDAGraph()
        with gpu.accelerator.graph(self.graph):
            self.out = self.wrapper.run(self.query, self.cache)

    def load(self, case: Case) -> None:
        self.query.copy_(case.query)
        for mine, other in zip(self.cache, (case.key, case.value), strict=True):
            mine[: len(other)].copy_(other)


def test_a_graph_uses_the_lengths_of_the_last_plan(gpu: Any) -> None:
    large, small = Case([1, 1], [20, 9]), Case([1, 1], [3, 0])
    fixed = Fixed(gpu, large)
    assert fixed.out.cpu().isnan().all()
    for case in (small, large):
        fixed.load(case)
        plan(fixed.wrapper, case)
        fixed.graph.replay()
        torch.testing.assert_close(fixed.out.cpu().double(), case.expected()[0], atol=2e-3, rtol=2e-3)


def test_a_replay_refuses_index_arrays_without_a_plan_for_them(gpu: Any) -> None:
    fixed = Fixed(gpu, Case([1, 1], [20, 9]))
    fixed.wrapper._buffers["paged_kv_last_page_len"].fill_(2)
    with pytest.raises(
        RuntimeError, match=r"run: the plan is for \[1, 1\] queries and \[20, 9\] keys, but the index arrays"
    ):
        fixed.graph.replay()


def test_a_graph_keeps_its_batch_its_rows_and_the_room_for_pages(gpu: Any) -> None:
    fixed = Fixed(gpu, Case([1, 1], [20, 9]))
    with pytest.raises(ValueError, match="batch size: is 3, the fixed batch size of this wrapper is 2"):
        plan(fixed.wrapper, Case([1, 1, 1], [1, 1, 1]))
    with pytest.raises(ValueError, match="paged_kv_indices: is of 65 entries, its buffer has 64"):
        plan(fixed.wrapper, Case([1, 1], [64, 1], page=1))
    rows = {
        "qo_indptr_buf": int32([0, 0]).to("gpusim"),
        "paged_kv_indptr_buf": int32([0, 0]).to("gpusim"),
        "paged_kv_indices_buf": int32([0] * 8).to("gpusim"),
        "paged_kv_last_page_len_buf": int32([0]).to("gpusim"),
    }
    wrapper = gpu.flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, **rows)
    plan(wrapper, Case([2], [4]))
    with pytest.raises(ValueError, match="rows: is 3, the first plan of this wrapper had 2"):
        plan(wrapper, Case([3], [4]))
    del rows["qo_indptr_buf"]
    with pytest.raises(ValueError, match="qo_indptr: is not given, must be a tensor with use_cuda_graph"):
        gpu.flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, **rows)


def pinned(gpu: Any, case: Case) -> None:
    """Move the index arrays of a case to pinned memory, as `plan` needs them while the device is busy."""
    for name in ("qo_indptr", "indptr", "last", "indices"):
        array = getattr(case, name)
        memory = gpu.accelerator.pinned(tuple(array.shape), torch.int32)
        memory.copy_(array)
        setattr(case, name, memory)


def test_a_second_plan_before_the_first_was_copied_is_found(deferred: Any) -> None:
    """FlashInfer's `plan` reuses its pinned memory; see sgl-project/mini-sglang#103."""
    first, second = Case([1], [7]), Case([1], [5])
    pinned(deferred, first)
    pinned(deferred, second)
    wrapper = deferred.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan(wrapper, first)
    query, cache = first.query.to("gpusim"), first.cache()  # waits for the plan
    wrapper.run(query, cache)
    plan(wrapper, second)
    wrapper.run(query, cache)
    deferred.accelerator.synchronize()
    plan(wrapper, first)
    wrapper.run(query, cache)
    plan(wrapper, second)
    with pytest.raises(RuntimeError, match=r"a later plan\(\) overwrote the schedule before it was copied"):
        deferred.accelerator.synchronize()
    deferred.accelerator.synchronize()


def test_two_wrappers_for_two_steps_in_flight(deferred: Any) -> None:
    cases = [Case([1], [7]), Case([1], [5])]
    outs = []
    for case in cases:
        pinned(deferred, case)
    steps = [(case.query.to("gpusim"), case.cache()) for case in cases]
    wrappers = [deferred.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()) for _ in cases]
    for case, wrapper, step in zip(cases, wrappers, steps, strict=True):
        plan(wrapper, case)
        outs.append(wrapper.run(*step))
    for case, out in zip(cases, outs, strict=True):
        torch.testing.assert_close(out.cpu().double(), case.expected()[0], atol=2e-3, rtol=2e-3)


def test_append_writes_into_pages(gpu: Any) -> None:
    case = Case([2, 1, 3], [6, 1, 3], page=4)
    key, value = case.cache("HND")
    lengths = gpu.flashinfer.get_seq_lens(case.indptr, case.last, case.page)
    assert lengths.tolist() == case.keys
    append = ends(case.queries).to("gpusim")
    rows, positions = gpu.flashinfer.get_batch_indices_positions(append, lengths.to("gpusim"), 6)
    assert rows.cpu().tolist() == [0, 0, 1, 2, 2, 2]
    assert positions.cpu().tolist() == [4, 5, 0, 0, 1, 2]
    new = torch.randn(6, 2, 64).half()
    arrays = [one.to("gpusim") for one in (case.indices, case.indptr, case.last)]
    gpu.flashinfer.append_paged_kv_cache(
        new.to("gpusim"), -new.to("gpusim"), rows, positions, (key, value), *arrays, "HND"
    )
    expected = case.key.clone()
    for token, (row, position) in enumerate(zip([0, 0, 1, 2, 2, 2], [4, 5, 0, 0, 1, 2], strict=True)):
        expected[case.indices[case.indptr[row] + position // 4], position % 4] = new[token]
    assert torch.equal(key.cpu().transpose(1, 2), expected)
    changed = (key.cpu().transpose(1, 2) != case.key).any((2, 3))
    assert torch.equal(value.cpu().transpose(1, 2)[changed], -expected[changed])
    with pytest.raises(ValueError, match=r"append_key: is torch.float32, must be float16"):
        gpu.flashinfer.append_paged_kv_cache(
            new.float().to("gpusim"), new.to("gpusim"), rows, positions, (key, value), *arrays, "HND"
        )
