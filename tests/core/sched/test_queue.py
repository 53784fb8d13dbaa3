"""The order of waiting requests, and the reserve for expected output."""

from __future__ import annotations

import pytest
from every import every
from sched_driver import Driver, limits, message

from srv.sched.queue import MAX_MATCHED_QUEUE, MAX_TIMES_BYPASSED, WaitingQueue
from srv.sched.request import Request
from srv.sched.reserve import DECAY_STEPS, INITIAL_RATIO, MAX_EXPECTED_TOKENS, MIN_RATIO_FACTOR, OutputReserve


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


@every("policy", ["fcfs", "lpm"])
def test_retracted_requests_go_first(policy: str) -> None:
    queue = WaitingQueue(policy, lambda request: ord(request.id))
    first, second, third = waiting(*"abc")
    queue.push(second)
    queue.push(third)
    first.reset_for_retract()
    queue.push_front(first)
    assert order(queue)[0] == "a"


def test_a_request_is_bypassed_at_most_a_limited_number_of_times() -> None:
    queue = WaitingQueue("lpm", lambda request: 0 if request.id == "unlucky" else 9)
    (unlucky,) = waiting("unlucky")
    queue.push(unlucky)
    passed = 0
    for number in range(10 * MAX_TIMES_BYPASSED):
        queue.push(waiting(str(number))[0])
        chosen = next(queue.candidates())
        queue.take(chosen)
        if chosen is unlucky:
            break
        passed += 1
    assert passed == MAX_TIMES_BYPASSED


def test_the_bound_holds_within_one_step_too() -> None:
    queue = WaitingQueue("lpm", lambda request: 0 if request.id == "unlucky" else 9)
    for request in waiting("unlucky", *map(str, range(2 * MAX_TIMES_BYPASSED))):
        queue.push(request)
    assert order(queue).index("unlucky") == MAX_TIMES_BYPASSED


def test_a_long_queue_is_not_matched() -> None:
    asked: list[str] = []

    def cached(request: Request) -> int:
        asked.append(request.id)
        return len(asked)

    queue = WaitingQueue("lpm", cached)
    for request in waiting(*map(str, range(MAX_MATCHED_QUEUE + 1))):
        queue.push(request)
    assert next(queue.candidates()).id == "0"
    assert asked == []
    queue.take(next(iter(queue)))
    assert next(queue.candidates()).id == str(MAX_MATCHED_QUEUE)
    assert len(asked) == MAX_MATCHED_QUEUE


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'random' is none of: fcfs, lpm"):
        WaitingQueue("random", lambda request: 0)


@every(("policy", "first"), [("fcfs", "cold"), ("lpm", "warm")])
def test_the_policy_decides_who_is_admitted(policy: str, first: str) -> None:
    driver = Driver(limits(policy=policy, max_running_requests=1))
    text = list(range(20))
    driver.add(message("warming", text, max_tokens=1))
    driver.run()
    driver.add(message("cold", text[::-1], max_tokens=1))
    driver.add(message("warm", text, max_tokens=1))
    plan = driver.submit()
    assert plan is not None
    assert driver.admitted[-1] == [first]


def test_the_ratio_decays_to_its_minimum_and_is_raised_after_a_retraction() -> None:
    reserve = OutputReserve(1.0)
    assert reserve.ratio == INITIAL_RATIO
    for _ in range(DECAY_STEPS + 5):
        reserve.decay()
    assert reserve.ratio == pytest.approx(INITIAL_RATIO * MIN_RATIO_FACTOR)
    reserve.raise_after_retraction(generated=40, allowed=199, requests=2)
    assert reserve.ratio == pytest.approx((40 + 2 * 20) / 200)
    reserve.raise_after_retraction(generated=0, allowed=10_000, requests=1)
    assert reserve.ratio == pytest.approx(0.4), "a retraction never lowers it"
    reserve.reset()
    assert reserve.ratio == INITIAL_RATIO


def test_conservativeness_scales_the_ratio_up_to_one() -> None:
    assert OutputReserve(0.5).ratio == pytest.approx(0.35)
    assert OutputReserve(5.0).ratio == 1.0
    assert OutputReserve(5.0).expected_tokens(10**9) == MAX_EXPECTED_TOKENS
