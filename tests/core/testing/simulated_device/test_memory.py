"""Device memory is counted, limited, freed, and separate from host memory."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys

import pytest
import torch

from srv.testing.simulated_device import SimulatedAccelerator

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _collected() -> None:
    gc.collect()


def test_memory_is_counted_and_comes_back(sim: SimulatedAccelerator) -> None:
    before, total = sim.mem_get_info()
    x = torch.empty(4 * MIB, dtype=torch.uint8, device="sim")
    y = x.float()
    assert sim.mem_get_info() == (before - 20 * MIB, total)
    del x
    assert sim.mem_get_info() == (before - 16 * MIB, total)
    del y
    assert sim.mem_get_info() == (before, total)


def test_views_share_memory_and_keep_it(sim: SimulatedAccelerator) -> None:
    before, _ = sim.mem_get_info()
    x = torch.zeros(MIB, device="sim")
    views = [x.view(1024, 1024), x[5:], x.view(torch.int32), x.unfold(0, 8, 8), x.detach()]
    assert sim.mem_get_info()[0] == before - 4 * MIB
    del x
    assert sim.mem_get_info()[0] == before - 4 * MIB
    assert views[0].sum().item() == 0
    del views
    assert sim.mem_get_info()[0] == before


def test_nothing_leaks_over_many_operators(sim: SimulatedAccelerator) -> None:
    x = torch.randn(64, 64, device="sim")
    layer = torch.nn.Linear(64, 64, device="sim")
    before = sim.memory_allocated()
    with torch.inference_mode():
        for _ in range(50):
            y = layer(x).softmax(-1).sort()[0][:, :3].contiguous()
            y.mul_(2).add_(y)
    del y
    layer(x).sum().backward()
    layer.zero_grad(set_to_none=True)
    assert sim.memory_allocated() == before


def test_replaced_data_gives_its_memory_back(sim: SimulatedAccelerator) -> None:
    before = sim.memory_allocated()
    x = torch.ones(MIB, device="sim")
    x.add_(1)
    x.data = torch.zeros(2, device="sim")
    assert sim.memory_allocated() - before <= 1024
    assert x.add_(3).tolist() == [3.0, 3.0]


def test_exhausting_the_memory_raises_and_takes_nothing(sim: SimulatedAccelerator) -> None:
    free, total = sim.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 is out of memory.*a smaller KV pool"):
        torch.empty(free + 1, dtype=torch.uint8, device="sim")
    x = torch.zeros(free // 2, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        x.float()
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([x, x, x])
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 50, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(total).to("sim")
    del x
    gc.collect()
    assert sim.mem_get_info() == (free, total)


def test_the_peak_is_remembered(sim: SimulatedAccelerator) -> None:
    taken = sim.memory_allocated()
    x = torch.zeros(8 * MIB, dtype=torch.uint8, device="sim")
    del x
    assert sim.max_memory_allocated() >= taken + 8 * MIB


def test_resizing_moves_to_a_larger_block(sim: SimulatedAccelerator) -> None:
    before = sim.memory_allocated()
    x = torch.arange(4.0, device="sim")
    x.resize_(1024)
    assert x.shape == (1024,)
    assert x[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sim.memory_allocated() == before + 4096
    out = torch.empty(0, device="sim")
    torch.add(x[:4], 1, out=out)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]
    del x, out
    assert sim.memory_allocated() == before


def test_a_host_program_that_reads_a_device_address_faults() -> None:
    program = (
        "import ctypes, torch; from srv.testing.simulated_device import SimulatedAccelerator, install;"
        "install('sim', SimulatedAccelerator, lambda: SimulatedAccelerator('sim', 1 << 20));"
        "x = torch.ones(4, device='sim'); print(x.tolist(), flush=True); ctypes.string_at(x.data_ptr(), 16)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert process.stdout == "[1.0, 1.0, 1.0, 1.0]\n"
    assert process.returncode == -signal.SIGSEGV
