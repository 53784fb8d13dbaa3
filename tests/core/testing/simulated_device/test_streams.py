"""Asynchronous copies need a synchronization, and the device has its own random numbers."""

from __future__ import annotations

import threading

import pytest
import torch

from srv.testing.simulated_device import SimulatedAccelerator
from srv.testing.simulated_device.stream import QUEUE_LIMIT, Event, Stream


def test_a_non_blocking_copy_arrives_when_the_host_waits(sim: SimulatedAccelerator) -> None:
    x = torch.tensor([1.0, 2.0], device="sim")
    host = x.to("cpu", non_blocking=True)
    x.zero_()  # later work does not change an earlier copy
    event = sim.current_stream().record_event()
    assert host.isnan().all()
    event.synchronize()
    assert host.tolist() == [1.0, 2.0]


def test_a_non_blocking_copy_into_host_memory_arrives_too(sim: SimulatedAccelerator) -> None:
    host = torch.zeros(2, 3, dtype=torch.int64)
    host.T.copy_(torch.tensor([[1, 2], [3, 4], [5, 6]], device="sim"), non_blocking=True)
    assert host.tolist() != [[1, 3, 5], [2, 4, 6]]
    sim.synchronize()
    assert host.tolist() == [[1, 3, 5], [2, 4, 6]]


@pytest.mark.parametrize("wait", ["item", "cpu", "synchronize", "print"])
def test_what_needs_a_result_now_waits(sim: SimulatedAccelerator, wait: str) -> None:
    x = torch.tensor([True, False], device="sim")
    host = x.to("cpu", non_blocking=True)
    waits = {"item": lambda: x[0].item(), "cpu": x.cpu, "synchronize": sim.synchronize, "print": lambda: repr(x)}
    waits[wait]()
    assert host.tolist() == [True, False]


def test_a_copy_from_the_host_reads_at_once() -> None:
    host = torch.ones(2)
    x = host.to("sim", non_blocking=True)
    host.zero_()
    assert x.tolist() == [1.0, 1.0]


def test_an_event_is_complete_once_its_stream_got_there() -> None:
    stream = Stream()
    order: list[str] = []
    event = Event()
    assert event.query()
    stream.enqueue(lambda: order.append("first"))
    event.record(stream)
    stream.enqueue(lambda: order.append("second"))
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert order == ["first"]
    assert not stream.query()
    stream.synchronize()
    assert stream.query()
    assert order == ["first", "second"]


def test_looking_often_enough_sees_the_event_complete() -> None:
    stream = Stream()
    event = stream.record_event()
    looks = [event.query() for _ in range(3)]
    assert looks == [False, True, True]


def test_an_event_recorded_again_marks_the_new_place() -> None:
    stream = Stream()
    event = stream.record_event()
    event.synchronize()
    stream.record_event(event)
    assert not event.query()


def test_a_stream_waits_for_another() -> None:
    first, second = Stream(), Stream()
    order: list[str] = []
    first.enqueue(lambda: order.append("first"))
    second.wait_stream(first)
    second.enqueue(lambda: order.append("second"))
    second.synchronize()
    assert order == ["first", "second"]


def test_waiting_for_an_event_means_the_place_it_marked_then() -> None:
    first, second = Stream(), Stream()
    event = first.record_event()
    second.wait_event(event)
    order: list[str] = []
    first.enqueue(lambda: order.append("later"))
    event.record(first)
    second.synchronize()
    assert order == []


def test_a_full_queue_holds_the_host_up() -> None:
    stream = Stream()
    order: list[int] = []
    for index in range(QUEUE_LIMIT + 3):
        stream.enqueue(lambda index=index: order.append(index))  # type: ignore[misc]
    assert order == [0, 1, 2]


def test_the_current_stream_belongs_to_the_thread(sim: SimulatedAccelerator) -> None:
    other = Stream()
    x = torch.ones(2, device="sim")
    with sim.stream(other):
        host = x.to("cpu", non_blocking=True)
        seen: list[Stream] = []
        thread = threading.Thread(target=lambda: seen.append(sim.current_stream()))
        thread.start()
        thread.join(10)
        assert seen == [sim.default_stream()]
    assert sim.current_stream() is sim.default_stream()
    sim.synchronize()
    assert host.isnan().all()
    other.synchronize()
    assert host.tolist() == [1.0, 1.0]


def test_another_thread_may_wait(sim: SimulatedAccelerator) -> None:
    with torch.inference_mode():
        host = torch.arange(4, device="sim").to("cpu", non_blocking=True)
        event = sim.current_stream().record_event()
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    thread.join(10)
    assert host.tolist() == [0, 1, 2, 3]


def draws() -> list[torch.Tensor]:
    x = torch.ones(8, device="sim")
    return [
        torch.randn(8, device="sim").cpu(),
        torch.rand_like(x).cpu(),
        torch.randperm(8, device="sim").cpu(),
        torch.randint(0, 100, (8,), device="sim").cpu(),
        torch.multinomial(x, 4).cpu(),
        torch.dropout(x, 0.5, True).cpu(),
        torch.native_dropout(x, 0.5, True)[0].cpu(),
        x.clone().exponential_().cpu(),
    ]


def test_equal_seeds_give_equal_numbers(sim: SimulatedAccelerator) -> None:
    sim.manual_seed(7)
    state = sim.get_rng_state()
    first = draws()
    second = draws()
    sim.set_rng_state(state)
    third = draws()
    torch.manual_seed(7)
    fourth = draws()
    for one, three, four in zip(first, third, fourth, strict=True):
        assert torch.equal(one, three)
        assert torch.equal(one, four)
    assert not torch.equal(first[0], second[0])


def test_the_device_leaves_the_hosts_random_numbers_alone(sim: SimulatedAccelerator) -> None:
    torch.manual_seed(3)
    wanted = torch.randn(4)
    torch.manual_seed(3)
    draws()
    assert torch.equal(torch.randn(4), wanted)


def test_a_generator_of_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device="sim", generator=torch.Generator())
