"""Requests share slots, pages and prompt tokens: a large one starves no other, and is not starved itself.

Everything is counted in steps of the fake executor, so that nothing here depends on the speed of a machine.
"""

from __future__ import annotations

import msgspec
from every import every
from sched_driver import Driver, limits, message

from srv.testing.fake_executor import expected_tokens
from srv.types import RequestSpec

LARGE_OUTPUT = 80


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + place * 7) % 48 for place in range(length)]


def part(group: str, number: int, prompt: list[int], max_tokens: int, owner: str = "") -> RequestSpec:
    """A sequence of the client request `group`."""
    spec = message(f"{group}.{number}", prompt, max_tokens)
    return msgspec.structs.replace(spec, group=group, owner=owner)


def add_large(driver: Driver, group: str = "large", sequences: int = 16, length: int = 10, **params: object) -> None:
    for number in range(sequences):
        assert driver.add(part(group, number, prompt_of(length, number // 8), LARGE_OUTPUT, **params)) is None  # type: ignore[arg-type]


def steps_until(driver: Driver, name: str, most: int = 500) -> int:
    """Steps that are applied until a request ends."""
    for number in range(1, most):
        while driver.submit() is not None:
            pass
        driver.apply()
        if any(output.finish for output in driver.outputs.get(name, [])):
            return number
    raise AssertionError(f"{name} has not ended after {most} steps")


def advance(driver: Driver, steps: int) -> None:
    for _ in range(steps):
        while driver.submit() is not None:
            pass
        driver.apply()


def running(driver: Driver) -> list[str]:
    """The groups (or ids) of the requests that hold slots."""
    return [request.spec.group or request.id for request in driver.scheduler._running]


@every("depth", [1, 2])
@every("policy", ["fcfs", "lpm"])
@every("prefix_cache", [True, False])
def test_a_short_request_starts_at_once_beside_a_large_one(depth: int, policy: str, prefix_cache: bool) -> None:
    """Alone it takes 4 steps. Beside a request that holds every slot it takes at most twice that and one step."""
    driver = Driver(limits(depth=depth, policy=policy, prefix_cache=prefix_cache), [200])
    add_large(driver)
    advance(driver, 10)
    assert running(driver) == ["large"] * 8, "alone, a request may take every slot"
    driver.add(message("short", prompt_of(6, 5), max_tokens=4))
    assert steps_until(driver, "short") <= 2 * 4 + 1
    assert driver.tokens("short") == expected_tokens(prompt_of(6, 5), 4)
    driver.run(20_000)
    for number in range(16):
        assert driver.tokens(f"large.{number}") == expected_tokens(prompt_of(10, number // 8), LARGE_OUTPUT)


def test_one_sequence_yields_and_is_not_computed_again() -> None:
    driver = Driver(limits(depth=2), [200])
    add_large(driver)
    advance(driver, 40)
    before = driver.scheduler.stats()
    driver.add(message("short", prompt_of(6, 5), max_tokens=4))
    steps_until(driver, "short")
    advance(driver, 5)
    assert driver.scheduler.stats().retractions == before.retractions + 1
    again = [
        row
        for plan in driver.plans[-12:]
        for start in plan.starts
        if start.request.group
        for row in plan.rows
        if row.slot == start.slot
    ]
    assert [row.scheduled <= 4 for row in again] == [True], "all full pages of the sequence are still cached"


@every("depth", [1, 2])
def test_a_request_that_holds_the_pages_yields_them(depth: int) -> None:
    """The pool is full long before the slots are."""
    driver = Driver(limits(depth=depth, max_running_requests=64, conservativeness=0.01), [60])
    add_large(driver, sequences=20)
    advance(driver, 60)
    for number in range(3):
        driver.add(message(f"short {number}", prompt_of(20, 5 + number), max_tokens=4))
        assert steps_until(driver, f"short {number}") <= 2 * 4 + 3
    driver.run(20_000)
    assert driver.tokens("large.19") == expected_tokens(prompt_of(10, 19 // 8), LARGE_OUTPUT)


@every("depth", [1, 2])
def test_long_prompts_leave_room_in_a_step(depth: int) -> None:
    driver = Driver(limits(depth=depth, chunked_prefill_size=16, prefix_cache=False), [1000])
    for number in range(2):
        driver.add(part("large", number, prompt_of(900, number), 1))
    advance(driver, 3)
    driver.add(message("short", prompt_of(8, 5), max_tokens=4))
    assert steps_until(driver, "short") <= 2 * 4 + 1


def test_two_long_prompts_share_the_steps() -> None:
    driver = Driver(limits(chunked_prefill_size=16, prefix_cache=False), [1000])
    driver.add(message("first", prompt_of(320), max_tokens=1))
    advance(driver, 1)
    driver.add(message("second", prompt_of(80, 3), max_tokens=1))
    assert steps_until(driver, "second") == 10, "8 tokens of each step are its own"
    assert steps_until(driver, "first") == 14


def test_a_large_request_is_not_starved_by_short_ones() -> None:
    driver = Driver(limits(max_running_requests=4, depth=2), [200])
    add_large(driver, sequences=4)
    for number in range(2 * LARGE_OUTPUT):
        for place in range(4):
            driver.add(message(f"short {number} {place}", prompt_of(3, number), max_tokens=4))
        advance(driver, 1)
        if any(driver.outputs[f"large.{index}"][-1].finish for index in range(4) if f"large.{index}" in driver.outputs):
            break
    assert driver.tokens("large.0") == expected_tokens(prompt_of(10), LARGE_OUTPUT), "it keeps a slot throughout"


def test_two_large_requests_end_up_with_half_of_the_slots_each() -> None:
    driver = Driver(limits(), [200])
    add_large(driver, "first", sequences=32)
    advance(driver, 5)
    add_large(driver, "second", sequences=32)
    advance(driver, 3)
    assert running(driver).count("second") == 1, "each further retraction would cost more than it gains"
    advance(driver, LARGE_OUTPUT + 20)
    assert running(driver).count("second") == 4


def test_api_keys_share_the_slots_whatever_the_number_of_their_requests() -> None:
    driver = Driver(limits(), [200])
    for number in range(12):
        driver.add(part(f"busy {number}", 0, prompt_of(6, number), LARGE_OUTPUT, "busy key"))
    advance(driver, 10)
    for number in range(12):
        driver.add(part(f"other {number}", 0, prompt_of(6, number), LARGE_OUTPUT, "other key"))
    advance(driver, 10)
    assert sum(name.startswith("other") for name in running(driver)) == 4
    driver.run(20_000)
    assert driver.tokens("busy 11.0") == expected_tokens(prompt_of(6, 11), LARGE_OUTPUT)


def test_requests_of_one_sequence_each_are_served_in_order_of_arrival() -> None:
    driver = Driver(limits(max_running_requests=2), [200])
    for number in range(8):
        driver.add(message(str(number), prompt_of(5, number), max_tokens=2))
    driver.run()
    assert [name for names in driver.admitted for name in names] == [str(number) for number in range(8)]
    assert driver.scheduler.stats().retractions == 0


def test_the_queue_limit_counts_requests_of_clients_that_have_not_started() -> None:
    driver = Driver(limits(max_running_requests=2, max_queued_requests=2), [200])
    add_large(driver, sequences=32)
    advance(driver, 2)
    assert driver.scheduler.stats().waiting == 30
    assert driver.add(message("a", prompt_of(3), max_tokens=90)) is None, "the large request has started"
    add_large(driver, "second", sequences=20)
    output = driver.add(message("b", prompt_of(3)))
    assert output is not None
    assert output.error == ("queue_full", "2 requests are waiting, the limit is 2; try later")


def test_owners_share_the_slots_by_max_min_fairness_over_hundreds_of_steps() -> None:
    """Six slots, three owners: one asks for all of them without end, one for two, one for one.

    The two small ones get what they ask for but for the step in which a sequence of the large one yields, and the large
    one gets all the rest. In order of arrival, the small ones would wait behind forty requests each time.
    """
    driver = Driver(limits(max_running_requests=6, depth=2, prefix_cache=False), [400])
    for number in range(40):
        driver.add(part(f"large {number}", 0, prompt_of(5, number), 60, "large"))
    advance(driver, 20)
    begin, sent, held = len(driver.plans), {"two": 0, "one": 0}, {"large": 0, "two": 0, "one": 0}
    for _ in range(200):
        for owner, wanted in (("two", 2), ("one", 1)):
            names = [name for name in driver.outputs if name.startswith(owner)]
            ended = sum(bool(driver.outputs[name][-1].finish) for name in names)
            while sent[owner] - ended < wanted:
                driver.add(part(f"{owner} {sent[owner]}", 0, prompt_of(5, sent[owner]), 20, owner))
                sent[owner] += 1
        advance(driver, 1)
        for request in driver.scheduler._running:
            held[request.spec.owner] += 1
    steps = len(driver.plans) - begin
    assert held["two"] >= 0.8 * 2 * steps, held
    assert held["one"] >= 0.8 * steps, held
    assert sum(held.values()) >= 0.95 * 6 * steps, "no slot stays empty"
