"""In-flight prefix deduplication: requests wait for a running request that computes their prefix."""

from __future__ import annotations

from every import every
from sched_driver import Driver, limits, message

from srv.memory.groups import PageGroup
from srv.sched.queue import MAX_TIMES_BYPASSED
from srv.sched.sharing import common_prefix_length
from srv.testing.fake_executor import FakeExecutor, expected_tokens
from srv.types import FinishReason

PAGE = 4
PROMPT = [(place * 7) % 48 for place in range(16)]
OTHER = [(place * 5 + 1) % 48 for place in range(16)]


def driver_of(
    pages: int = 400, executor: FakeExecutor | None = None, page_size: int = PAGE, **changes: object
) -> Driver:
    return Driver(limits(**changes), [pages], executor, page_size=page_size)


@every("depth", [1, 2])
@every("policy", ["fcfs", "lpm"])
@every("chunk", [-1, 128, 512])
@every("page_size", [1, 16])
def test_eight_equal_prompts_are_computed_once(depth: int, policy: str, chunk: int, page_size: int) -> None:
    prompt = [(place * 7) % 48 for place in range(500)]
    settings = limits(depth=depth, policy=policy, chunked_prefill_size=chunk)
    driver = Driver(settings, [4000 // page_size], page_size=page_size)
    for number in range(8):
        driver.add(message(str(number), prompt, max_tokens=1))
    driver.run()
    shared = (len(prompt) - 1) // page_size * page_size
    assert sum(row.scheduled for plan in driver.plans for row in plan.rows) == 500 + 7 * (500 - shared)
    assert [driver.last(str(number)).cached_tokens for number in range(8)] == [0] + [shared] * 7
    assert all(driver.tokens(str(number)) == expected_tokens(prompt, 1) for number in range(8))


def test_no_request_waits_for_states_that_cannot_be_saved() -> None:
    """A model with recurrent layers, and no slots for snapshots of their states."""
    driver = Driver(limits(), snapshots=0)
    for number in range(3):
        driver.add(message(str(number), PROMPT))
    driver.submit()
    assert driver.admitted == [["0", "1", "2"]]
    driver.run()


@every("depth", [1, 2])
def test_a_request_waits_while_its_prompt_is_computed(depth: int) -> None:
    driver = driver_of(depth=depth, chunked_prefill_size=8)
    driver.add(message("first", PROMPT))
    driver.submit()
    driver.add(message("second", PROMPT))
    driver.run()
    assert driver.last("second").cached_tokens == 12
    assert driver.tokens("second") == driver.tokens("first") == expected_tokens(PROMPT, 8)


def test_other_requests_bypass_those_that_wait_for_a_prefix() -> None:
    driver = driver_of()
    for name, prompt in (("first", PROMPT), ("second", PROMPT), ("other", OTHER)):
        driver.add(message(name, prompt))
    plan = driver.submit()
    assert plan is not None
    assert driver.admitted[-1] == ["first", "other"]


def test_a_waiting_request_is_bypassed_a_limited_number_of_times() -> None:
    """While a long prompt is computed in many steps, only a limited number of requests may bypass the waiting one."""
    prompt = [place % 48 for place in range(400)]
    driver = driver_of(pages=1000, chunked_prefill_size=4, max_running_requests=60)
    driver.add(message("first", prompt, max_tokens=1))
    driver.submit()
    driver.add(message("second", prompt, max_tokens=1))
    for number in range(2 * MAX_TIMES_BYPASSED):
        driver.add(message(f"other {number}", [47 - number % 40], max_tokens=1))
    driver.run()
    order = [name for names in driver.admitted for name in names]
    assert order.index("second") <= 1 + MAX_TIMES_BYPASSED
    assert driver.last("second").cached_tokens == 396


def test_a_few_common_tokens_are_not_waited_for() -> None:
    driver = driver_of()
    driver.add(message("first", PROMPT[:4] + OTHER))
    driver.add(message("second", PROMPT))
    plan = driver.submit()
    assert plan is not None
    assert driver.admitted[-1] == ["first", "second"]


def test_requests_do_not_wait_across_namespaces() -> None:
    driver = driver_of()
    driver.add(message("mine", PROMPT, namespace="mine"))
    driver.add(message("yours", PROMPT, namespace="yours"))
    plan = driver.submit()
    assert plan is not None
    assert len(plan.starts) == 2


def test_without_prefix_cache_requests_do_not_wait() -> None:
    driver = driver_of(prefix_cache=False)
    for name in ("first", "second"):
        driver.add(message(name, PROMPT))
    plan = driver.submit()
    assert plan is not None
    assert len(plan.starts) == 2


def test_a_prompt_with_logprobs_does_not_wait() -> None:
    """Scored positions must be computed by the request itself; those before the first score may be shared."""
    driver = driver_of()
    driver.add(message("first", PROMPT))
    driver.add(message("scored", PROMPT, prompt_logprobs=0))
    driver.add(message("scored late", PROMPT, prompt_logprobs=0, prompt_logprobs_start=13))
    plan = driver.submit()
    assert plan is not None
    assert driver.admitted[-1] == ["first", "scored"]
    driver.apply()
    driver.run()
    assert driver.last("scored late").cached_tokens == 12
    scores = [score for output in driver.outputs["scored"] for score in output.prompt_logprobs or ()]
    assert len(scores) == len(PROMPT) - 1


@every("depth", [1, 2])
def test_the_next_request_becomes_the_producer_when_the_producer_is_aborted(depth: int) -> None:
    driver = driver_of(depth=depth, chunked_prefill_size=4)
    for name in ("first", "second", "third"):
        driver.add(message(name, PROMPT))
    driver.submit()
    driver.abort(["first"])
    driver.run()
    assert driver.last("first").finish is FinishReason.ABORT
    assert driver.tokens("second") == driver.tokens("third") == expected_tokens(PROMPT, 8)
    assert driver.last("third").cached_tokens == 12
    assert driver.last("second").cached_tokens <= 4, "no more than what the first had computed"


def test_the_next_request_becomes_the_producer_when_the_producer_fails() -> None:
    executor = FakeExecutor([PageGroup(400, PAGE)], row_error=lambda step, slot: step == 0)
    driver = driver_of(executor=executor)
    for name in ("first", "second", "third"):
        driver.add(message(name, PROMPT))
    driver.run()
    assert driver.last("first").finish is FinishReason.ERROR
    assert [driver.last(name).cached_tokens for name in ("second", "third")] == [0, 12]


def test_requests_wait_again_for_a_retracted_producer_that_resumes() -> None:
    """The pool is too small for the older request and the producer's long prompt together."""
    driver = driver_of(pages=12, chunked_prefill_size=4, conservativeness=0.01, page_size=1, depth=1)
    driver.add(message("old", OTHER[:2], max_tokens=9))
    driver.add(message("first", PROMPT[:8], max_tokens=1))
    driver.add(message("second", PROMPT[:8], max_tokens=1))
    driver.run()
    assert driver.tokens("first") == driver.tokens("second") == expected_tokens(PROMPT[:8], 1)
    assert driver.tokens("old") == expected_tokens(OTHER[:2], 9)


def test_a_prompt_is_shared_although_its_prefix_was_computed_twice() -> None:
    """Two prompts with a common prefix in one step: both are cached completely, and duplicate pages are freed."""
    stem = PROMPT[:4]
    left, right = stem + OTHER[:12], stem + OTHER[4:]
    driver = driver_of()
    for name, prompt in (("left", left), ("right", right), ("left again", left), ("right again", right)):
        driver.add(message(name, prompt))
    plan = driver.submit()
    assert plan is not None
    assert driver.admitted[-1] == ["left", "right"]
    driver.run()
    assert [driver.last(name).cached_tokens for name in ("left again", "right again")] == [12, 12]
    stats = driver.scheduler.stats()
    assert stats.pages_held == 0
    assert stats.pages_cached + stats.pages_free == stats.pages_total


def test_duplicate_pages_never_block_the_last_request() -> None:
    """It needs every page of the pool; its duplicate pages are freed first."""
    stem = PROMPT[:4]
    driver = driver_of(pages=20, page_size=1, conservativeness=0.01, depth=1)
    driver.add(message("short", [*stem, 40, 41], max_tokens=1))
    driver.add(message("long", [*stem, 42, 43, 44, 45, 46], max_tokens=12))
    driver.run()
    assert driver.tokens("long") == expected_tokens([*stem, 42, 43, 44, 45, 46], 12)
    assert driver.scheduler.stats().retractions == 1


@every("same", [0, 1, 2, 7, 8, 9, 16])
@every("limit", [0, 1, 8, 15, 16, 40])
def test_the_common_prefix_is_counted(same: int, limit: int) -> None:
    one = tuple(range(16))
    other = (*range(same), *range(100, 116 - same))
    assert common_prefix_length(one, other, limit) == min(same, limit)
