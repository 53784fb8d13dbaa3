"""The asynchronous mode: operators run when the host waits, and a program that does not wait gets wrong values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from srv.testing.simulated_device import Graph, SimulatedAccelerator


@pytest.fixture(autouse=True)
def asynchronous(sim: SimulatedAccelerator) -> Iterator[None]:
    sim.synchronize()
    sim.deferral.enabled = True
    yield
    sim.synchronize()
    sim.deferral.enabled = False


def pinned(sim: SimulatedAccelerator, *values: float) -> torch.Tensor:
    return sim.pinned((len(values),), torch.float32).copy_(torch.tensor(values))


def test_operators_run_in_order_once_the_host_waits(sim: SimulatedAccelerator) -> None:
    x = torch.arange(6.0).view(2, 3)
    on_device = x.to("sim")
    result = on_device @ on_device.T + 1
    result += result.sum()
    values, order = torch.cat([result, result]).sort(-1)
    host = sim.pinned((4, 2), torch.float32).copy_(values, non_blocking=True)
    assert host.isnan().all()
    sim.synchronize()
    expected = x @ x.T + 1
    expected += expected.sum()
    assert torch.equal(host, torch.cat([expected, expected]).sort(-1).values)
    assert order.cpu().tolist() == [[0, 1]] * 4


def test_an_operator_whose_result_depends_on_data_waits(sim: SimulatedAccelerator) -> None:
    x = torch.zeros(4, device="sim")
    x += 1
    x[1] = 0
    assert x.nonzero().flatten().cpu().tolist() == [0, 2, 3]
    assert x.sum().item() == 3


def test_host_memory_that_is_overwritten_too_early_reaches_the_device(sim: SimulatedAccelerator) -> None:
    source = pinned(sim, 1.0, 2.0)
    early = source.to("sim", non_blocking=True)
    source.fill_(7.0)
    assert early.cpu().tolist() == [7.0, 7.0]
    late = source.to("sim", non_blocking=True)
    sim.current_stream().record_event().synchronize()
    source.fill_(8.0)
    assert late.cpu().tolist() == [7.0, 7.0]


@pytest.mark.parametrize("onto", [True, False])
def test_ordinary_host_memory_is_refused_for_copies_that_do_not_block(sim: SimulatedAccelerator, onto: bool) -> None:
    x = torch.ones(2) if onto else torch.ones(2, device="sim")
    with pytest.raises(RuntimeError, match=f"{'from' if onto else 'to'} host memory that is not pinned"):
        x.to("sim" if onto else "cpu", non_blocking=True)


def test_copies_from_and_to_ordinary_host_memory_are_counted(sim: SimulatedAccelerator) -> None:
    before = sim.pageable_copies
    x = pinned(sim, 1.0).to("sim", non_blocking=True)
    sim.pinned((1,), torch.float32).copy_(x, non_blocking=True)
    assert sim.pageable_copies == before
    torch.ones(1).to("sim").cpu()
    assert sim.pageable_copies == before + 2


def test_streams_know_nothing_of_one_another_without_an_event(sim: SimulatedAccelerator) -> None:
    other = sim.Stream()
    result = torch.ones(2, device="sim") + 1
    early, late = sim.pinned((2,), torch.float32), sim.pinned((2,), torch.float32)
    with sim.stream(other):
        early.copy_(result, non_blocking=True)
    other.synchronize()
    assert early.isnan().all()
    other.wait_event(sim.current_stream().record_event())
    with sim.stream(other):
        late.copy_(result, non_blocking=True)
    other.synchronize()
    assert late.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_another_stream_has_still_to_read_must_be_kept(sim: SimulatedAccelerator, kept: bool) -> None:
    other, host = sim.Stream(), sim.pinned((2,), torch.float32)
    result = torch.ones(2, device="sim") + 1
    other.wait_event(sim.current_stream().record_event())
    with sim.stream(other):
        host.copy_(result, non_blocking=True)
    if not kept:
        del result
    sim.synchronize()
    other.synchronize()
    assert host.isnan().all() == (not kept)


def test_a_replay_runs_in_order_with_the_values_of_its_call(sim: SimulatedAccelerator) -> None:
    x = torch.zeros(2, device="sim")
    graph = Graph(sim.deferral.enqueue)
    sim.synchronize()
    with sim.recorder.recording(graph, sim.memory):
        y = torch.add(x, x, alpha=7)
    x.fill_(1.0)
    results = []
    for alpha in (1, 2):
        graph.update(alpha=alpha)
        graph.replay()
        results.append(sim.pinned((2,), torch.float32).copy_(y, non_blocking=True))
    sim.synchronize()
    assert [result.tolist() for result in results] == [[2.0, 2.0], [3.0, 3.0]]


def test_an_error_of_an_operator_is_raised_where_the_host_waits(sim: SimulatedAccelerator) -> None:
    table, index = torch.zeros(3, device="sim"), torch.tensor([5]).to("sim")
    table.index_select(0, index)
    with pytest.raises(IndexError):
        sim.synchronize()
