"""Captures on any simulated device: what they record and refuse. Plugins add their own kinds of graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from srv.testing.simulated_device import Graph, GraphMemory, SimulatedAccelerator


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (lambda x: x.cpu(), "a copy between host and device"),
        (lambda x: x.copy_(torch.ones(2)), "a copy between host and device"),
        (lambda x: x.sum().item(), "reading a number on the host"),
        (lambda x: torch.sim.synchronize(), "synchronize"),  # type: ignore[attr-defined]
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[x > 0], "aten::index.Tensor"),
        (lambda x: x.masked_select(x > 0), "aten::masked_select"),
        (lambda x: torch.equal(x, x), "aten::equal"),
        (lambda x: x.uniform_(), "aten::uniform_, which draws random numbers"),
        (lambda x: torch.bernoulli(x), "aten::bernoulli_.Tensor, which draws random numbers"),
        (lambda x: x.long().repeat_interleave(x.long()), "aten::repeat_interleave.Tensor"),
    ],
)
def test_a_capture_refuses_what_a_replay_could_not_do_again(sim: SimulatedAccelerator, work: Any, what: str) -> None:
    x = torch.ones(2, device="sim")
    refusal = pytest.raises(RuntimeError, match=f"^{what}: not permitted while sim:0 captures a graph; ")
    with refusal, sim.recorder.recording(Graph(), sim.memory):
        work(x)
    assert not sim.recorder.busy
    work(x)


def test_a_result_of_another_shape_is_found_at_the_replay(sim: SimulatedAccelerator) -> None:
    graph = Graph()
    x = torch.zeros(3, device="sim")
    with sim.recorder.recording(graph, sim.memory):
        torch.split(x, 1)
        torch.cat([x, x], dim=0)
    graph.replay()
    graph._calls[-1].args = ([torch.zeros(2)],)
    with pytest.raises(RuntimeError, match=r"aten::cat returns \(2,\) now and returned \(6,\) when it was captured"):
        graph.replay()


def test_what_is_as_long_as_its_index_is_recorded(sim: SimulatedAccelerator) -> None:
    graph = Graph()
    x, index = torch.arange(4.0, device="sim"), torch.tensor([2, 0], device="sim")
    with sim.recorder.recording(graph, sim.memory):
        taken = x[index]
        repeated = taken.repeat_interleave(index, output_size=2)
    x.add_(10)
    graph.replay()
    assert (taken.tolist(), repeated.tolist()) == ([12.0, 10.0], [12.0, 12.0])


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_capture_makes_is_zeroed_copied_and_resized_again(sim: SimulatedAccelerator, shared: bool) -> None:
    """`zero_`, copies within the device and allocations have their own kernels, which are recorded too."""
    graph = Graph()
    x = torch.arange(4.0, device="sim")
    with sim.recorder.recording(graph, GraphMemory(sim.memory) if shared else sim.memory):
        total = torch.zeros(4, device="sim")
        total += x.to(torch.float16)
        values, order = torch.empty(0, device="sim"), torch.empty(0, dtype=torch.int64, device="sim")
        torch.sort(x, descending=True, out=(values, order))
    for _ in range(2):
        x.copy_(torch.tensor([3.0, 9.0, 1.0, 2.0]))
        graph.replay()
    assert total.tolist() == [3.0, 9.0, 1.0, 2.0]
    assert values.tolist() == [9.0, 3.0, 2.0, 1.0]
    assert order.tolist() == [1, 0, 3, 2]
