"""The GPU: identity, properties, memory, streams and events. PyTorch's operators: `srv.testing`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

GIB = 1 << 30


def test_it_reports_that_it_is_simulated(gpu: Any) -> None:
    cuda = gpu.accelerator
    assert cuda is torch.gpusim
    assert gpu.device_type == "gpusim"
    assert cuda.get_device_name(0) == "NVIDIA H100 80GB HBM3 (simulated)"
    properties = cuda.get_device_properties(torch.device("gpusim", 0))
    assert "simulated" in properties.name
    assert (properties.major, properties.minor) == cuda.get_device_capability() == (9, 0)
    assert properties.multi_processor_count == 132
    assert properties.total_memory == cuda.mem_get_info()[1] == 80 * GIB
    assert (properties.warp_size, properties.shared_memory_per_block_optin) == (32, 227 << 10)
    assert "simulated" in gpu.flashinfer.__version__
    assert gpu.aiter is None
    assert cuda.is_bf16_supported()
    assert not hasattr(cuda, "XPUGraph")


def test_there_is_one_gpu(gpu: Any) -> None:
    assert gpu.accelerator.is_available()
    assert gpu.accelerator.device_count() == 1
    with gpu.accelerator.device("gpusim:0"):
        assert gpu.accelerator.current_device() == 0
    with (
        pytest.raises(RuntimeError, match="gpusim:1 was asked for, but there is one device"),
        gpu.accelerator.device(1),
    ):
        pass


def test_memory_figures(gpu: Any) -> None:
    cuda = gpu.accelerator
    gc.collect()
    cuda.empty_cache()
    before = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    x = torch.zeros(3 << 20, dtype=torch.uint8, device="gpusim")
    assert cuda.memory_allocated() == cuda.memory_reserved() == before + (3 << 20)
    assert cuda.mem_get_info() == (80 * GIB - before - (3 << 20), 80 * GIB)
    del x
    stats = cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == before
    assert stats["allocated_bytes.all.peak"] == cuda.max_memory_allocated() == before + (3 << 20)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"GPU out of memory. Tried to allocate .* on gpusim:0 \(simulated\)"
    ):
        torch.empty(81 * GIB, dtype=torch.uint8, device="gpusim")


def test_operands_of_two_devices_are_refused(gpu: Any) -> None:
    with pytest.raises(RuntimeError, match=r"^aten::add.Tensor: expected all tensors to be on the same device"):
        torch.ones(3, device="gpusim") + torch.ones(3)


def test_streams_and_events(gpu: Any) -> None:
    cuda = gpu.accelerator
    x = torch.arange(3).to("gpusim")
    side = cuda.Stream(priority=-1)
    with cuda.stream(side):
        assert cuda.current_stream() is side
        host = x.to("cpu", non_blocking=True)
    with cuda.stream(None):
        assert cuda.current_stream() is cuda.default_stream()
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record(side)
    end.record(side)
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be recorded and complete"):
        start.elapsed_time(end)
    cuda.current_stream().wait_stream(side)
    cuda.current_stream().synchronize()
    assert end.query()
    assert host.tolist() == [0, 1, 2]
    assert start.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        start.elapsed_time(cuda.Event())


def test_synchronize_waits_for_all_streams_also_dropped_ones(deferred: Any) -> None:
    cuda = deferred.accelerator
    x = torch.zeros(3, device="gpusim")
    cuda.synchronize()
    with cuda.stream(cuda.Stream()):
        x += 1
    gc.collect()
    out = cuda.pinned((3,), torch.float32)
    out.copy_(x, non_blocking=True)
    cuda.current_stream().synchronize()
    assert out.tolist() == [0, 0, 0]  # nothing ordered the streams
    cuda.synchronize()
    assert x.cpu().tolist() == [1, 1, 1]


def test_an_event_orders_streams(deferred: Any) -> None:
    cuda = deferred.accelerator
    side, x = cuda.Stream(), torch.zeros(3, device="gpusim")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x += 1
        event = side.record_event()
    cuda.current_stream().wait_event(event)
    assert x.cpu().tolist() == [1, 1, 1]


def test_random_numbers_follow_the_seed(gpu: Any) -> None:
    gpu.accelerator.manual_seed(7)
    first = torch.rand(5, device="gpusim").cpu()
    gpu.accelerator.manual_seed_all(7)
    assert torch.equal(torch.rand(5, device="gpusim").cpu(), first)
