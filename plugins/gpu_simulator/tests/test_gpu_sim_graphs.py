"""Graphs: the same addresses, memory pools, streams of a capture, and what a capture refuses."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch


def captured(gpu: Any, run: Any, **options: Any) -> tuple[Any, Any]:
    graph = gpu.accelerator.CUDAGraph()
    with gpu.accelerator.graph(graph, **options):
        result = run()
    return graph, result


def test_a_replay_reads_and_writes_the_same_memory(gpu: Any) -> None:
    x, total = torch.zeros(4, device="gpusim"), torch.zeros(4, device="gpusim")
    index = torch.tensor([2, 0], device="gpusim")

    def run() -> torch.Tensor:
        total.add_(x)
        return (x * 2)[index].view(2, 1)

    graph, y = captured(gpu, run)
    total.zero_()
    address = y.data_ptr()
    for _ in range(2):
        x.copy_(torch.arange(4.0))
        graph.replay()
    assert y.cpu().tolist() == [[4], [0]]
    assert y.data_ptr() == address
    assert total.cpu().tolist() == [0, 2, 4, 6]


def test_a_capture_leaves_nothing_to_read_also_in_views(gpu: Any) -> None:
    x = torch.ones(4, device="gpusim")
    graph, (half, count) = captured(gpu, lambda: ((x + 1).split(2)[0], torch.ones_like(x, dtype=torch.int32)))
    assert half.cpu().isnan().all()
    assert count.cpu().tolist() == [2**31 - 1] * 4
    graph.replay()
    assert half.cpu().tolist() == [2, 2]
    assert count.cpu().tolist() == [1] * 4


def test_graphs_of_one_pool_overwrite_one_another_and_others_do_not(gpu: Any) -> None:
    cuda = gpu.accelerator
    x = torch.ones(1 << 16, device="gpusim")
    pool = cuda.graph_pool_handle()
    first, y = captured(gpu, lambda: x + 1, pool=pool)
    address = y.data_ptr()
    del y
    second, z = captured(gpu, lambda: x + 2, pool=pool)
    assert z.data_ptr() == address
    assert second.pool() == first.pool() == pool
    second.replay()
    first.replay()
    assert z.cpu()[0] == 2
    _, other = captured(gpu, lambda: x + 3)
    assert other.data_ptr() != address


def test_the_memory_of_a_pool_is_freed_with_its_graphs(gpu: Any) -> None:
    gc.collect()
    x = torch.ones(1 << 18, device="gpusim")
    before = gpu.accelerator.memory_allocated()
    graph, _ = captured(gpu, lambda: (x + 1).sum())
    assert gpu.accelerator.memory_allocated() >= before + (1 << 20)
    graph.reset()
    del graph, _
    gc.collect()
    assert gpu.accelerator.memory_allocated() == before


def test_a_replay_refuses_memory_that_has_been_freed(gpu: Any) -> None:
    held = [torch.ones(3, device="gpusim")]
    graph, _ = captured(gpu, lambda: held[0] + 1)
    graph.replay()
    held.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match=r"^CUDAGraph\.replay: memory that the captured aten::add.Tensor uses"):
        graph.replay()


@pytest.mark.parametrize(
    ("what", "act"),
    [
        ("a copy between host and device", lambda cuda, x: x.copy_(torch.ones(3))),
        ("a copy between host and device", lambda cuda, x: x.cpu()),
        ("reading a number on the host", lambda cuda, x: x.sum().item()),
        ("synchronize", lambda cuda, x: cuda.synchronize()),
        ("Stream.synchronize", lambda cuda, x: cuda.current_stream().synchronize()),
        ("Event.synchronize", lambda cuda, x: cuda.current_stream().record_event().synchronize()),
        ("Event.query", lambda cuda, x: cuda.Event().query()),
        ("aten::nonzero", lambda cuda, x: x.nonzero()),
        ("aten::index.Tensor", lambda cuda, x: x[x > 0]),
    ],
)
def test_a_capture_refuses_what_waits_or_crosses(gpu: Any, what: str, act: Any) -> None:
    x = torch.ones(3, device="gpusim")
    with pytest.raises(RuntimeError, match=f"^{what}: not permitted while a stream is being captured"):
        captured(gpu, lambda: act(gpu.accelerator, x))
    assert not gpu.accelerator.is_current_stream_capturing()
    act(gpu.accelerator, x)


def test_captures_begin_in_a_side_stream_and_do_not_nest(gpu: Any) -> None:
    cuda = gpu.accelerator
    x = torch.ones(3, device="gpusim")
    outer, inner = cuda.CUDAGraph(), cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"^CUDAGraph\.capture_begin: .*stream that is not the default"):
        outer.capture_begin()
    with cuda.stream(cuda.Stream()):
        outer.capture_begin()
        assert cuda.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match=r"^CUDAGraph\.capture_begin: another capture is under way"):
            inner.capture_begin()
        y = x + 1
        outer.capture_end()
    outer.replay()
    assert y.cpu().tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match=r"^CUDAGraph\.capture_begin: this graph holds a capture"):
        outer.capture_begin()
    outer.reset()
    for act, refusal in ((outer.replay, "replay: nothing"), (outer.pool, "pool: nothing")):
        with pytest.raises(RuntimeError, match=rf"^CUDAGraph\.{refusal} was captured"):
            act()


def test_a_stream_joins_a_capture_with_an_event_and_must_be_joined_again(gpu: Any) -> None:
    cuda = gpu.accelerator
    side, x = cuda.Stream(), torch.ones(3, device="gpusim")

    def work(fork: bool, join: bool) -> torch.Tensor:
        main = cuda.current_stream()
        if fork:
            side.wait_stream(main)
        with cuda.stream(side):
            y = x + 1
        if join:
            main.wait_stream(side)
        return y

    graph, y = captured(gpu, lambda: work(True, True))
    graph.replay()
    assert y.cpu().tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match=r"^aten::add.Tensor: not permitted in this stream"):
        captured(gpu, lambda: work(False, False))
    with pytest.raises(RuntimeError, match=r"^CUDAGraph\.capture_end: 1 streams .* were not joined"):
        captured(gpu, lambda: work(True, False))
    event = side.record_event()
    with pytest.raises(RuntimeError, match=r"^Event\.wait: .* recorded outside the capture"):
        captured(gpu, lambda: event.wait())


def test_a_replay_is_in_order_with_its_stream_and_sees_later_inputs(deferred: Any) -> None:
    cuda = deferred.accelerator
    x, host = torch.zeros(3, device="gpusim"), cuda.pinned((3,), torch.float32)
    graph, y = captured(deferred, lambda: x * 2)
    results = [cuda.pinned((3,), torch.float32) for _ in range(2)]
    for step, result in enumerate(results):
        host.fill_(step + 1)
        x.copy_(host, non_blocking=True)
        graph.replay()
        result.copy_(y, non_blocking=True)
        if step == 0:
            cuda.current_stream().synchronize()  # before host is written again
    assert results[1].isnan().all()
    cuda.current_stream().synchronize()
    assert [result[0].item() for result in results] == [2, 4]


def test_random_numbers_of_a_replay_are_new_ones(gpu: Any) -> None:
    x = torch.empty(64, device="gpusim")
    graph, _ = captured(gpu, lambda: x.uniform_())
    graph.replay()
    first = x.cpu()
    graph.replay()
    assert not torch.equal(x.cpu(), first)
