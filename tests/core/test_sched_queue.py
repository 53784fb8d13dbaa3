"""The order of waiting, and the reserve for expected output."""

from __future__ import annotations

import pytest
from sched_driver import Driver, limits, message

from srv.sched.queue import LONGEST_MATCHED_QUEUE, MAX_OVERTAKEN, WaitingQueue
from srv.sched.request import Request
from srv.sched.reserve import DECAY_STEPS, INITIAL_SHARE, LEAST_SHARE, OUTPUT_CLIP, OutputReserve


def waiting(*names: str) -> list[Request]:
    return [Request(message(name, [1]), arrival, 100, frozenset()) for arrival, name in enumerate(names)]


def order(queue: WaitingQueue) -> list[str]:
    """The names in the order in which they would be admitted."""
    names = []
    for request in queue.candidates():
        queue.take(request)
        names.append(request.id)
    return names


def test_first_come_first_served() -> None:
    queue = WaitingQueue("fcfs", lambda request: ord(request.id))
    for request in waiting(*"abc"):
        queue.push(request)
    assert order(queue) == ["a", "b", "c"]


def test_longest_cached_prefix_first_and_equal_ones_by_arrival() -> None:
    cached = {"a": 1, "b": 3, "c": 1, "d": 3}
    queue = WaitingQueue("lpm", lambda request: cached[request.id])
    for request in waiting(*"abcd"):
        queue.push(request)
    assert order(queue) == ["b", "d", "a", "c"]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_retracted_requests_go_first(policy: str) -> None:
    queue = WaitingQueue(policy, lambda request: ord(request.id))
    first, second, third = waiting(*"abc")
    queue.push(second)
    queue.push(third)
    first.wait_again()
    queue.push_front(first)
    assert order(queue)[0] == "a"


def test_a_request_is_overtaken_so_often_and_no_more() -> None:
    queue = WaitingQueue("lpm", lambda request: 0 if request.id == "unlucky" else 9)
    (unlucky,) = waiting("unlucky")
    queue.push(unlucky)
    passed = 0
    for number in range(10 * MAX_OVERTAKEN):
        queue.push(waiting(str(number))[0])
        chosen = next(queue.candidates())
        queue.take(chosen)
        if chosen is unlucky:
            break
        passed += 1
    assert passed == MAX_OVERTAKEN


def test_the_bound_holds_within_one_step_too() -> None:
    queue = WaitingQueue("lpm", lambda request: 0 if request.id == "unlucky" else 9)
    for request in waiting("unlucky", *map(str, range(2 * MAX_OVERTAKEN))):
        queue.push(request)
    assert order(queue).index("unlucky") == MAX_OVERTAKEN


def test_a_long_queue_is_not_matched() -> None:
    asked: list[str] = []

    def cached(request: Request) -> int:
        asked.append(request.id)
        return len(asked)

    queue = WaitingQueue("lpm", cached)
    for request in waiting(*map(str, range(LONGEST_MATCHED_QUEUE + 1))):
        queue.push(request)
    assert next(queue.candidates()).id == "0"
    assert asked == []
    queue.take(next(iter(queue)))
    assert next(queue.candidates()).id == str(LONGEST_MATCHED_QUEUE)
    assert len(asked) == LONGEST_MATCHED_QUEUE


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'random' is none of: fcfs, lpm"):
        WaitingQueue("random", lambda request: 0)


@pytest.mark.parametrize(("policy", "first"), [("fcfs", "cold"), ("lpm", "warm")])
def test_the_policy_decides_who_is_admitted(policy: str, first: str) -> None:
    driver = Driver(limits(policy=policy, max_running_requests=1))
    text = list(range(20))
    driver.add(message("warming", text, max_tokens=1))
    driver.run()
    driver.add(message("cold", text[::-1], max_tokens=1))
    driver.add(message("warm", text, max_tokens=1))
    plan = driver.submit()
    assert plan is not None
    assert plan.starts[0].request == first


def test_the_share_decays_to_its_least_and_jumps_after_a_retraction() -> None:
    reserve = OutputReserve(1.0)
    assert reserve.share == INITIAL_SHARE
    for _ in range(DECAY_STEPS + 5):
        reserve.decay()
    assert reserve.share == pytest.approx(INITIAL_SHARE * LEAST_SHARE)
    reserve.retracted(generated=40, allowed=199, requests=2)
    assert reserve.share == pytest.approx((40 + 2 * 20) / 200)
    reserve.retracted(generated=0, allowed=10_000, requests=1)
    assert reserve.share == pytest.approx(0.4), "a retraction never lowers it"
    reserve.reset()
    assert reserve.share == INITIAL_SHARE


def test_conservativeness_scales_the_share_up_to_all() -> None:
    assert OutputReserve(0.5).share == pytest.approx(0.35)
    assert OutputReserve(5.0).share == 1.0
    assert OutputReserve(5.0).expect(10**9) == OUTPUT_CLIP
