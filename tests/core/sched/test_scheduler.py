"""The rules of the scheduler, with the fake executor, which checks every plan."""

from __future__ import annotations

import gc
import itertools

import pytest
from every import every
from sched_driver import END, Driver, embedding, limits, message

from srv.errors import InternalError
from srv.io.messages import Output
from srv.memory.groups import PageGroup
from srv.sched.plan import Plan, Result, RowResult
from srv.sched.request import Request
from srv.testing.fake_executor import FakeExecutor, expected_tokens, expected_vectors, kv_cells_of
from srv.types import FinishReason, Pooling


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + place * 7) % 48 for place in range(length)]


def shape(plan: Plan) -> list[tuple[int, int, int]]:
    return [(row.computed, row.scheduled, row.sample) for row in plan.rows]


# ---- tokens are the same however they are scheduled


@every("depth", [1, 2])
@every("chunk", [-1, 1, 16, 512])
@every("page_size", [1, 4, 16])
def test_tokens_do_not_depend_on_chunks_depth_or_page_size(depth: int, chunk: int, page_size: int) -> None:
    driver = Driver(limits(depth=depth, chunked_prefill_size=chunk), [400 // page_size], page_size=page_size)
    prompts = [prompt_of(length, first) for first, length in enumerate([1, 5, 16, 33, 40])]
    for number, prompt in enumerate(prompts):
        driver.add(message(str(number), prompt, max_tokens=12))
    driver.run()
    for number, prompt in enumerate(prompts):
        assert driver.tokens(str(number)) == expected_tokens(prompt, 12)
        assert driver.last(str(number)).finish is FinishReason.LENGTH
    stats = driver.scheduler.stats()
    assert stats.pages_held == stats.running == stats.waiting == 0
    assert stats.finished == 5
    assert stats.generated_tokens == 60


def test_cache_groups_get_tables_of_their_own() -> None:
    driver = Driver(limits(chunked_prefill_size=8), [30, 20])
    for number in range(3):
        driver.add(message(str(number), prompt_of(20, number)))
    driver.run()
    assert all(driver.tokens(str(number)) == expected_tokens(prompt_of(20, number), 8) for number in range(3))


# ---- plans


def test_chunks_cut_a_prompt_and_only_the_last_samples() -> None:
    driver = Driver(limits(chunked_prefill_size=16))
    driver.add(message("a", prompt_of(40), max_tokens=2))
    driver.run()
    assert [shape(plan) for plan in driver.plans] == [
        [(0, 16, 0)],
        [(16, 16, 0)],
        [(32, 8, 1)],
        [(40, 1, 1)],
    ]


def test_decode_rows_come_first_and_prompts_share_the_budget() -> None:
    driver = Driver(limits(chunked_prefill_size=16))
    driver.add(message("a", prompt_of(4)))
    driver.submit()
    driver.apply()
    for name, length in (("b", 10), ("c", 10), ("d", 10)):
        driver.add(message(name, prompt_of(length, ord(name))))
    plan = driver.submit()
    assert plan is not None
    assert shape(plan) == [(4, 1, 1), (0, 10, 1), (0, 6, 0)]
    assert sum(row.scheduled for row in plan.rows[1:]) == 16


def test_unchunked_prompts_stay_within_the_budget_but_a_longer_one_runs_alone() -> None:
    driver = Driver(limits(chunked_prefill_size=-1, max_prefill_tokens=20))
    for name, length in (("a", 8), ("b", 8), ("c", 8), ("d", 50), ("e", 4)):
        driver.add(message(name, prompt_of(length, ord(name)), max_tokens=1))
    driver.run()
    assert [[row.scheduled for row in plan.rows] for plan in driver.plans] == [[8, 8], [8], [50], [4]]


def test_requests_without_chunking_are_forgotten_when_they_end() -> None:
    """With recurrent layers, rows end where states are saved, so that prompts are computed in parts all the same."""
    driver = Driver(limits(chunked_prefill_size=-1), snapshots=4)
    for number in range(5):
        driver.add(message(f"unchunked {number}", prompt_of(10, number), max_tokens=1))
        driver.run()
    driver.add(message("last", prompt_of(4, 99), max_tokens=1))
    driver.run()
    assert [len(plan.rows) for plan in driver.plans] == [1] * 11, "two parts of each prompt, but of the last"
    live = [instance.id for instance in gc.get_objects() if isinstance(instance, Request)]
    assert [name for name in live if name.startswith("unchunked")] == []


def test_two_steps_in_flight_plan_the_next_row_before_the_token_is_known() -> None:
    driver = Driver(limits(depth=2))
    driver.add(message("a", prompt_of(4), max_tokens=3))
    plans = [driver.submit(), driver.submit()]
    assert [shape(plan) for plan in plans if plan] == [[(0, 4, 1)], [(4, 1, 1)]]
    assert driver.submit() is None, "no more than `depth` steps may be in flight"
    driver.apply()
    last = driver.submit()
    assert last is not None
    assert shape(last) == [(5, 1, 1)]
    driver.apply()
    assert driver.submit() is None, "nothing is left to sample"
    driver.apply()
    assert driver.tokens("a") == expected_tokens(prompt_of(4), 3)


def test_plans_contain_only_new_pages() -> None:
    driver = Driver(limits())
    driver.add(message("a", prompt_of(6), max_tokens=5))
    driver.run()
    assert [len(plan.rows[0].new_pages[0]) for plan in driver.plans] == [2, 0, 0, 1, 0]


def test_slots_are_ended_and_reused() -> None:
    driver = Driver(limits(max_running_requests=1))
    driver.add(message("a", prompt_of(4), max_tokens=1))
    driver.add(message("b", prompt_of(4, 9), max_tokens=1))
    driver.run()
    assert [plan.ends for plan in driver.plans] == [(), (0,)]
    assert [plan.starts[0].slot for plan in driver.plans] == [0, 0]


def test_accepted_draft_tokens_are_appended_together() -> None:
    driver = Driver(limits(drafts=3, depth=2))
    driver.add(message("a", prompt_of(9), max_tokens=20))
    driver.add(message("b", prompt_of(7, 3), max_tokens=20))
    driver.run()
    assert driver.tokens("a") == expected_tokens(prompt_of(9), 20)
    assert driver.tokens("b") == expected_tokens(prompt_of(7, 3), 20)
    assert max(len(output.tokens) for output in driver.outputs["a"]) > 1
    assert len(driver.plans) < 20


def test_the_next_row_is_planned_while_drafts_are_in_flight() -> None:
    """Its `computed` is an upper bound, and it has pages for the case that every draft is accepted."""
    driver = Driver(limits(drafts=3, depth=2))
    driver.add(message("a", prompt_of(9), max_tokens=40))
    driver.run()
    rows = [plan.rows[0] for plan in driver.plans]
    assert [(row.computed, row.scheduled, row.sample, row.drafts, row.drafts_in_flight) for row in rows[:3]] == [
        (0, 9, 1, 0, 0),
        (9, 4, 4, 3, 0),
        (13, 4, 4, 3, 3),
    ]
    assert sum(row.drafts_in_flight > 0 for row in rows) > len(rows) // 2
    assert driver.tokens("a") == expected_tokens(prompt_of(9), 40)


@every("steps", [2, 3, 4, 5, 6])
def test_kv_of_rejected_drafts_is_not_shared(steps: int) -> None:
    """The fake executor fails if a later request would read it."""
    driver = Driver(limits(drafts=3), page_size=1)
    driver.add(message("a", prompt_of(6), max_tokens=40))
    for _ in range(steps):
        driver.submit()
        driver.apply()
    driver.abort(["a"])
    shared = prompt_of(6) + driver.tokens("a")
    driver.add(message("b", [*shared, 7], max_tokens=3))
    driver.run()
    assert driver.last("b").cached_tokens == len(shared) - 1
    assert driver.tokens("b") == expected_tokens([*shared, 7], 3)


def test_without_device_lengths_a_request_with_drafts_in_flight_waits() -> None:
    driver = Driver(limits(drafts=3, depth=2, device_lengths=False))
    driver.add(message("a", prompt_of(9), max_tokens=20))
    driver.add(message("b", prompt_of(7, 3), max_tokens=20))
    driver.run()
    assert all(row.drafts_in_flight == 0 for plan in driver.plans for row in plan.rows)
    assert driver.tokens("a") == expected_tokens(prompt_of(9), 20)


def test_drafts_take_at_most_half_of_the_token_budget() -> None:
    driver = Driver(limits(drafts=3, chunked_prefill_size=10))
    driver.add(message("a", prompt_of(9), max_tokens=40))
    driver.add(message("b", prompt_of(9, 3), max_tokens=40))
    driver.add(message("c", prompt_of(60, 5), max_tokens=4))
    driver.run()
    beside_a_prompt = [plan for plan in driver.plans if any(row.scheduled > 4 for row in plan.rows)]
    assert beside_a_prompt
    for plan in driver.plans:
        assert sum(row.drafts for row in plan.rows) <= 5
        assert sum(row.scheduled - row.sample + row.drafts for row in plan.rows) <= 10


def test_requests_with_hidden_states_have_no_drafts() -> None:
    driver = Driver(limits(drafts=3))
    driver.add(message("a", prompt_of(9), max_tokens=10, hidden_states=True))
    driver.run()
    assert all(row.drafts == 0 for plan in driver.plans for row in plan.rows)


# ---- the end of a request


def ending(after: int, length: int = 9) -> tuple[list[int], int]:
    """A prompt, and a token that occurs first as output number `after`."""
    for first in range(48):
        prompt = prompt_of(length, first)
        tokens = expected_tokens(prompt, after)
        if tokens[-1] not in tokens[:-1] and END not in tokens:
            return prompt, tokens[-1]
    raise AssertionError("no such prompt")


@every("depth", [1, 2])
def test_a_stop_token_ends_and_is_sent(depth: int) -> None:
    prompt, stop = ending(5)
    driver = Driver(limits(depth=depth))
    driver.add(message("a", prompt, max_tokens=30, stop_token_ids=(stop,)))
    driver.run()
    assert driver.tokens("a") == expected_tokens(prompt, 5)
    last = driver.last("a")
    assert (last.finish, last.stop_token) == (FinishReason.STOP, stop)
    assert driver.scheduler.stats().pages_held == 0


@every("ignored", [False, True])
def test_the_models_end_token_ends_unless_ignored(ignored: bool) -> None:
    prompt = next(
        prompt
        for prompt in (prompt_of(5 + first // 48, first) for first in itertools.count())
        if END in expected_tokens(prompt, 10)
    )
    tokens = expected_tokens(prompt, 10)
    driver = Driver(limits())
    driver.add(message("a", prompt, max_tokens=10, ignore_eos=ignored))
    driver.run()
    if ignored:
        assert driver.tokens("a") == tokens
        assert driver.last("a").finish is FinishReason.LENGTH
    else:
        assert driver.tokens("a") == tokens[: tokens.index(END) + 1]
        assert driver.last("a").stop_token == END


def test_tokens_drafted_after_the_end_are_dropped() -> None:
    for after in range(2, 12):
        prompt, stop = ending(after)
        driver = Driver(limits(drafts=4))
        driver.add(message("a", prompt, max_tokens=30, stop_token_ids=(stop,), logprobs=0))
        driver.run()
        assert driver.tokens("a") == expected_tokens(prompt, after)
        for output in driver.outputs["a"]:
            assert [one.token for one in output.logprobs or ()] == output.tokens


def test_the_context_length_ends_a_request() -> None:
    driver = Driver(limits(context_length=20))
    driver.add(message("a", prompt_of(15), max_tokens=100))
    driver.run()
    assert len(driver.tokens("a")) == 5
    assert driver.last("a").finish is FinishReason.LENGTH


def test_a_request_without_output_only_scores_its_prompt() -> None:
    driver = Driver(limits(chunked_prefill_size=4))
    driver.add(message("a", prompt_of(10), max_tokens=0, prompt_logprobs=0))
    driver.run()
    scores = [score for output in driver.outputs["a"] for score in output.prompt_logprobs or ()]
    assert [score.logprob for score in scores] == [-float(place) for place in range(1, 10)]
    assert driver.tokens("a") == []
    assert driver.last("a").finish is FinishReason.LENGTH


def test_a_stop_string_ends_without_an_output() -> None:
    driver = Driver(limits(depth=2))
    driver.add(message("a", prompt_of(5), max_tokens=50))
    driver.submit()
    driver.submit()
    driver.apply()
    sent = len(driver.outputs["a"])
    driver.scheduler.finish("a")
    driver.scheduler.finish("a")
    driver.run()
    assert len(driver.outputs["a"]) == sent
    assert driver.scheduler.stats().finished == 1
    assert driver.scheduler.stats().pages_held == 0


def test_steps_within_a_prompt_send_nothing() -> None:
    driver = Driver(limits(chunked_prefill_size=4))
    driver.add(message("a", prompt_of(12), max_tokens=1))
    driver.run()
    assert len(driver.plans) == 3
    assert len(driver.outputs["a"]) == 1


# ---- abort


def test_abort_of_a_waiting_request_answers_at_once() -> None:
    driver = Driver(limits())
    driver.add(message("a", prompt_of(5)))
    (output,) = driver.abort(["a", "a", "unknown"])
    assert (output.request, output.finish) == ("a", FinishReason.ABORT)
    assert driver.scheduler.idle


def test_abort_in_flight_is_answered_when_the_last_row_has_been_applied() -> None:
    driver = Driver(limits(depth=2))
    driver.add(message("a", prompt_of(5)))
    driver.submit()
    driver.submit()
    assert driver.abort(["a"]) == []
    assert driver.abort(["a"]) == []
    assert driver.apply() == []
    assert driver.scheduler.stats().pages_held > 0
    assert [output.finish for output in driver.apply()] == [FinishReason.ABORT]
    assert driver.scheduler.idle
    assert driver.scheduler.stats().pages_held == 0
    assert driver.scheduler.stats().aborted == 1


def test_kv_of_an_aborted_request_can_still_be_hit() -> None:
    driver = Driver(limits())
    driver.add(message("a", prompt_of(9)))
    driver.submit()
    driver.abort(["a"])
    driver.apply()
    driver.add(message("b", prompt_of(9)))
    driver.run()
    assert driver.last("b").cached_tokens == 8


def test_abort_between_steps_frees_the_pages_at_once() -> None:
    driver = Driver(limits())
    driver.add(message("a", prompt_of(5)))
    driver.submit()
    driver.apply()
    assert [output.finish for output in driver.abort(None)] == [FinishReason.ABORT]
    assert driver.scheduler.stats().pages_held == 0


def test_abort_of_all() -> None:
    driver = Driver(limits(max_running_requests=2))
    for number in range(5):
        driver.add(message(str(number), prompt_of(6, number)))
    driver.submit()
    driver.abort(None)
    driver.run()
    assert all(driver.last(str(number)).finish is FinishReason.ABORT for number in range(5))


# ---- refusals


def refused(output: Output | None) -> str:
    assert output is not None
    assert output.finish is FinishReason.ERROR
    assert output.error is not None
    return output.error[0]


def test_requests_that_can_never_run_are_refused_with_a_code() -> None:
    driver = Driver(limits(context_length=100), [10])
    assert refused(driver.add(message("a", []))) == "empty_prompt"
    assert refused(driver.add(message("b", prompt_of(100)))) == "context_length_exceeded"
    assert refused(driver.add(message("c", prompt_of(20), max_tokens=22))) == "exceeds_pool"
    assert driver.scheduler.idle


@every(
    ("prompt", "params", "where"),
    [
        ([1, 50], {}, "prompt contains token id 50"),
        ([-1, 1], {}, "prompt contains token id -1"),
        ([1], {"stop_token_ids": (2, 99)}, "stop_token_ids contains token id 99"),
        ([1], {"logit_bias": ((0, 1.0), (-3, 1.0))}, "logit_bias contains token id -3"),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_alone(
    prompt: list[int], params: dict[str, object], where: str
) -> None:
    driver = Driver(limits(vocab_size=50))
    driver.add(message("good", prompt_of(5)))
    refused = driver.add(message("bad", prompt, **params))
    assert refused is not None
    assert refused.finish is FinishReason.ERROR
    assert refused.error == ("invalid_token_id", f"{where}, but the vocabulary is 0 to 49; leave it out")
    driver.run()
    assert driver.tokens("good") == expected_tokens(prompt_of(5), 8)


def test_the_largest_request_that_fits_the_pool_runs() -> None:
    driver = Driver(limits(), [10])
    assert driver.scheduler.max_request_tokens == 41
    assert driver.add(message("a", prompt_of(20), max_tokens=21)) is None
    driver.run()
    assert driver.tokens("a") == expected_tokens(prompt_of(20), 21)


def test_a_full_queue_refuses_and_says_how_many_wait() -> None:
    driver = Driver(limits(max_queued_requests=1))
    assert driver.add(message("a", prompt_of(5))) is None
    output = driver.add(message("b", prompt_of(5)))
    assert refused(output) == "queue_full"
    assert output is not None
    assert output.error == ("queue_full", "1 requests are waiting, the limit is 1; try later")


def test_a_duplicate_request_id_is_refused_and_the_first_request_keeps_running() -> None:
    driver = Driver(limits())
    assert driver.add(message("a", prompt_of(5))) is None
    assert refused(driver.scheduler.add(message("a", prompt_of(5)))) == "duplicate_request"
    driver.run()
    assert driver.tokens("a") == expected_tokens(prompt_of(5), 8)


# ---- prefix cache


def test_a_repeated_prompt_hits_all_but_what_must_be_computed() -> None:
    driver = Driver(limits())
    for name in ("a", "b"):
        driver.add(message(name, prompt_of(16), max_tokens=1))
        driver.run()
    assert driver.last("a").cached_tokens == 0
    assert driver.last("b").cached_tokens == 12, "at least one token is computed, and hits are whole pages"
    assert driver.scheduler.stats().cached_tokens == 12
    assert driver.scheduler.stats().prompt_tokens == 32


def test_output_is_shared_too() -> None:
    driver = Driver(limits())
    driver.add(message("a", prompt_of(8), max_tokens=9))
    driver.run()
    longer = prompt_of(8) + driver.tokens("a") + [1, 2]
    driver.add(message("b", longer, max_tokens=1))
    driver.run()
    assert driver.last("b").cached_tokens == 16


def test_a_prompt_is_shared_as_soon_as_it_is_computed() -> None:
    driver = Driver(limits())
    driver.add(message("a", prompt_of(16), max_tokens=20))
    driver.submit()
    driver.apply()
    driver.add(message("b", prompt_of(16), max_tokens=20))
    driver.run()
    assert driver.last("b").cached_tokens == 12
    assert driver.tokens("b") == driver.tokens("a") == expected_tokens(prompt_of(16), 20)


def test_namespaces_do_not_share() -> None:
    driver = Driver(limits())
    for name in ("x", "y"):
        driver.add(message(name, prompt_of(16), namespace=name))
        driver.run()
    assert driver.last("y").cached_tokens == 0


def test_without_prefix_cache_nothing_is_hit_and_every_page_is_free() -> None:
    driver = Driver(limits(prefix_cache=False))
    for name in ("a", "b"):
        driver.add(message(name, prompt_of(16)))
        driver.run()
    assert driver.last("b").cached_tokens == 0
    assert driver.scheduler.stats().pages_free == driver.scheduler.stats().pages_total


def test_flush_waits_for_running_requests() -> None:
    driver = Driver(limits())
    driver.add(message("a", prompt_of(16)))
    driver.submit()
    assert driver.scheduler.flush() is False
    driver.run()
    assert driver.scheduler.stats().pages_cached > 0
    assert driver.scheduler.flush() is True
    assert driver.scheduler.stats().pages_free == driver.scheduler.stats().pages_total


@every(("start", "hit"), [(0, 0), (1, 0), (4, 0), (5, 4), (11, 8), (16, 12), (99, 12)])
def test_prompt_logprobs_limit_the_hit(start: int, hit: int) -> None:
    driver = Driver(limits())
    driver.add(message("a", prompt_of(16), max_tokens=1))
    driver.run()
    driver.add(message("b", prompt_of(16), max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start))
    driver.run()
    scores = [score.logprob for output in driver.outputs["b"] for score in output.prompt_logprobs or ()]
    assert driver.last("b").cached_tokens == hit
    assert scores == [-float(place) for place in range(max(start, 1), 16)]


@every("depth", [1, 2])
@every("chunk", [1, 3, 16, -1])
def test_each_prompt_position_is_scored_once(depth: int, chunk: int) -> None:
    driver = Driver(limits(depth=depth, chunked_prefill_size=chunk))
    driver.add(message("a", prompt_of(14), max_tokens=3, prompt_logprobs=0, prompt_logprobs_start=5))
    driver.run()
    scores = [score.logprob for output in driver.outputs["a"] for score in output.prompt_logprobs or ()]
    assert scores == [-float(place) for place in range(5, 14)]


# ---- embeddings and hidden states


@every("pooling", list(Pooling))
@every("depth", [1, 2])
@every("chunk", [1, 3, 16, -1])
def test_an_embedding_pools_each_position_once_and_ends_with_its_prompt(
    pooling: Pooling, depth: int, chunk: int
) -> None:
    driver = Driver(limits(depth=depth, chunked_prefill_size=chunk))
    driver.add(embedding("a", prompt_of(14), pooling))
    driver.run()
    cells = kv_cells_of(prompt_of(14))
    pooled = cells[-1] if pooling is Pooling.LAST else sum(cells)
    (output,) = driver.outputs["a"]
    assert (output.finish, output.tokens, output.stop_token) == (FinishReason.STOP, [], None)
    assert output.vectors == expected_vectors([pooled])


@every(("pooling", "hit"), [(Pooling.LAST, 12), (Pooling.MEAN, 0)])
def test_a_mean_is_computed_from_every_position_and_the_last_token_hits_the_rest(pooling: Pooling, hit: int) -> None:
    driver = Driver(limits())
    driver.add(message("a", prompt_of(16), max_tokens=1))
    driver.run()
    driver.add(embedding("b", prompt_of(16), pooling))
    driver.run()
    assert driver.last("b").cached_tokens == hit
    driver.add(message("c", prompt_of(17), max_tokens=1))
    driver.run()
    assert driver.last("c").cached_tokens == 16, "the pages of an embedded prompt can be hit"


@every("depth", [1, 2])
def test_hidden_states_are_returned_once_per_position_also_after_a_retraction(depth: int) -> None:
    driver = Driver(limits(conservativeness=0.01, chunked_prefill_size=16, depth=depth), [45], page_size=1)
    for number in range(3):
        driver.add(message(str(number), prompt_of(8, number), max_tokens=30, hidden_states=number == 2))
    driver.run()
    assert driver.scheduler.stats().retractions > 0
    tokens = prompt_of(8, 2) + expected_tokens(prompt_of(8, 2), 30)[:-1]
    assert driver.vectors("2") == expected_vectors(kv_cells_of(tokens))
    assert driver.vectors("1") == b""


def test_a_prompt_as_long_as_the_context_can_be_embedded_but_not_continued() -> None:
    driver = Driver(limits(context_length=16))
    assert driver.add(embedding("a", prompt_of(16), Pooling.LAST)) is None
    refused = driver.add(embedding("b", prompt_of(17), Pooling.LAST))
    assert refused is not None
    assert refused.error == (
        "context_length_exceeded",
        "the prompt has 17 tokens, but the context length is 16; shorten the prompt",
    )
    driver.run()
    assert driver.vectors("a") != b""


# ---- sliding windows


@every("depth", [1, 2])
def test_pages_behind_a_window_are_freed_once_no_step_in_flight_reads_them(depth: int) -> None:
    groups = [PageGroup(64, 4), PageGroup(12, 4, window=5)]
    driver = Driver(limits(depth=depth, chunked_prefill_size=8), groups=groups)
    driver.add(message("a", prompt_of(60), max_tokens=20))
    for _ in range(depth):
        driver.submit()  # its check of integrity compares what was freed with the confirmed tokens
    driver.run()
    assert driver.tokens("a") == expected_tokens(prompt_of(60), 20)
    assert driver.scheduler.stats().pages_held == 0


# ---- retraction


def tight(**changes: object) -> Driver:
    """A pool for about two requests, of which three are admitted, because little output is expected."""
    settings = limits(conservativeness=0.01, **{"chunked_prefill_size": 16, **changes})
    driver = Driver(settings, [45], page_size=1)
    for number in range(3):
        driver.add(message(str(number), prompt_of(8, number), max_tokens=30))
    return driver


@every("depth", [1, 2])
@every("chunk", [-1, 1, 16])
@every("prefix_cache", [True, False])
def test_retracted_requests_resume_and_lose_nothing(depth: int, chunk: int, prefix_cache: bool) -> None:
    driver = tight(depth=depth, chunked_prefill_size=chunk, prefix_cache=prefix_cache)
    driver.run()
    assert driver.scheduler.stats().retractions > 0
    for number in range(3):
        assert driver.tokens(str(number)) == expected_tokens(prompt_of(8, number), 30)
    assert driver.scheduler.stats().pages_held == 0


@every("depth", [1, 2])
def test_the_latest_arrival_is_retracted_and_never_the_first(depth: int) -> None:
    driver = tight(depth=depth)
    driver.run()
    starts = [name for names in driver.admitted for name in names]
    assert starts[:3] == ["0", "1", "2"]
    assert starts.count("0") == 1
    assert starts[3:5] == ["1", "2"], "2 gave its pages up before 1, and both wait in order of arrival"
    assert [name for name in driver.outputs if driver.last(name)] == ["0", "1", "2"]


def rows_of(driver: Driver, plan: Plan) -> list[str]:
    slots: dict[int, str] = {}
    for earlier, names in zip(driver.plans[: plan.step + 1], driver.admitted, strict=False):
        slots.update({start.slot: name for start, name in zip(earlier.starts, names, strict=True)})
    return [slots[row.slot] for row in plan.rows]


def test_a_victim_in_flight_gets_no_row_and_is_retracted_after_its_step() -> None:
    driver = Driver(limits(depth=2, conservativeness=0.01), [6])
    driver.add(message("old", prompt_of(7), max_tokens=10))
    driver.add(message("young", prompt_of(6, 1), max_tokens=12))
    driver.submit()
    for _ in range(5):
        plan = driver.submit()
        assert plan is not None
        assert rows_of(driver, plan) == ["old", "young"]
        driver.apply()
    assert driver.submit() is None, "old finds no fourth page, and young is held back so that it can yield"
    driver.apply()
    plan = driver.submit()
    assert plan is not None
    assert rows_of(driver, plan) == ["old"]
    assert driver.scheduler.stats().retractions == 1
    driver.run()
    assert driver.tokens("old") == expected_tokens(prompt_of(7), 10)
    assert driver.tokens("young") == expected_tokens(prompt_of(6, 1), 12)


def test_a_resumed_request_starts_with_its_output() -> None:
    driver = tight()
    driver.run()
    started = [
        start
        for plan, names in zip(driver.plans, driver.admitted, strict=True)
        for start, name in zip(plan.starts, names, strict=True)
        if name == "2"
    ]
    again = started[1]
    assert again.request.tokens == tuple(prompt_of(8, 2))
    assert list(again.output) == driver.tokens("2")[: len(again.output)] != []


def test_cached_tokens_do_not_count_a_resumed_requests_own_prefix() -> None:
    driver = tight()
    driver.run()
    assert driver.last("2").cached_tokens == 0
    assert driver.scheduler.stats().cached_tokens == 0
    assert driver.scheduler.stats().prompt_tokens == 24


def test_a_suspended_request_that_is_retracted_is_not_counted_until_it_runs_again() -> None:
    """Otherwise a loop would wait for its mask, and not for the pages that it needs first."""
    driver = Driver(limits(conservativeness=0.01), [6])
    driver.add(message("old", prompt_of(7), max_tokens=10))
    driver.add(message("young", prompt_of(6, 1), max_tokens=12))
    for _ in range(5):
        driver.submit()
        driver.apply()
    driver.scheduler.suspend(["young"])
    assert driver.scheduler.suspended == 1
    while not driver.scheduler.stats().retractions:
        assert driver.submit() is not None
        driver.apply()
    assert driver.scheduler.suspended == 0
    driver.scheduler.resume("young")
    driver.run()
    assert driver.tokens("young") == expected_tokens(prompt_of(6, 1), 12)


def test_a_prompt_retracted_half_way_is_scored_once() -> None:
    driver = Driver(limits(conservativeness=0.01, chunked_prefill_size=2), [50], page_size=1)
    driver.add(message("0", prompt_of(4), max_tokens=46))
    for _ in range(20):
        driver.submit()
        driver.apply()
    driver.add(message("1", prompt_of(24, 5), max_tokens=4, prompt_logprobs=0))
    driver.run()
    assert driver.scheduler.stats().retractions > 0
    scores = [score.logprob for output in driver.outputs["1"] for score in output.prompt_logprobs or ()]
    assert scores == [-float(place) for place in range(1, 24)]
    assert driver.tokens("1") == expected_tokens(prompt_of(24, 5), 4)


def test_the_estimate_reserves_pages_for_expected_output() -> None:
    def admitted_together(conservativeness: float) -> int:
        driver = Driver(limits(conservativeness=conservativeness), [100], page_size=1)
        for number in range(8):
            driver.add(message(str(number), prompt_of(8, number), max_tokens=32))
        plan = driver.submit()
        assert plan is not None
        return len(plan.starts)

    assert [admitted_together(value) for value in (0.01, 1.0, 10.0)] == [8, 3, 2]


def arrivals(driver: Driver, wave: str) -> int:
    """The number of requests that are admitted in one step, out of twenty."""
    for number in range(20):
        driver.add(message(f"{wave} {number}", prompt_of(8, number), max_tokens=100))
    plan = driver.submit()
    assert plan is not None
    driver.apply()
    return len(plan.starts)


def test_the_estimate_decays_while_decoding_succeeds_and_is_reset_when_idle() -> None:
    driver = Driver(limits(max_running_requests=32), [1000], page_size=1)
    driver.add(message("long", prompt_of(4), max_tokens=700))
    for _ in range(601):
        driver.submit()
        driver.apply()
    assert arrivals(driver, "with long") == 20
    driver.run()
    assert arrivals(driver, "from idle") == 12, "each is expected to take 8 + 0.7 * 100 of 1000 pages"


def test_a_retraction_raises_the_estimate() -> None:
    driver = tight()
    while driver.scheduler.stats().retractions == 0:
        driver.submit()
        driver.apply()
    driver.abort(["2"])
    before = len(driver.plans)
    driver.add(message("next", prompt_of(3, 9), max_tokens=30))
    driver.abort(["1"])
    plan = driver.submit()
    assert plan is not None
    assert len(driver.plans) == before + 1
    assert plan.starts == (), "3 prompt pages are free, but 30 tokens of output are expected now"


# ---- failures


def test_a_failed_row_fails_only_its_request() -> None:
    executor = FakeExecutor([PageGroup(64, 4)], row_error=lambda step, slot: step == 3 and slot == 1)
    driver = Driver(limits(depth=2), executor=executor)
    for number in range(3):
        driver.add(message(str(number), prompt_of(8, number), max_tokens=10))
    driver.run()
    assert driver.last("1").error == ("row_failed", "the row failed")
    assert driver.tokens("1") == expected_tokens(prompt_of(8, 1), 3)
    for name in ("0", "2"):
        assert driver.tokens(name) == expected_tokens(prompt_of(8, int(name)), 10)


def test_kv_of_a_failed_request_is_not_shared() -> None:
    executor = FakeExecutor([PageGroup(64, 4)], row_error=lambda step, slot: step == 1)
    driver = Driver(limits(chunked_prefill_size=8), executor=executor)
    driver.add(message("a", prompt_of(16)))
    driver.run()
    assert driver.last("a").finish is FinishReason.ERROR
    assert driver.scheduler.stats().pages_cached == 0


@every("depth", [1, 2])
def test_a_failed_step_fails_only_its_requests(depth: int) -> None:
    executor = FakeExecutor([PageGroup(64, 4)], step_error=lambda step: step == 2)
    driver = Driver(limits(depth=depth, max_running_requests=2), executor=executor)
    for number in range(4):
        driver.add(message(str(number), prompt_of(8, number), max_tokens=10))
    driver.run()
    for name in ("0", "1"):
        assert driver.last(name).error == ("step_failed", "the step failed")
    for name in ("2", "3"):
        assert driver.tokens(name) == expected_tokens(prompt_of(8, int(name)), 10)
    stats = driver.scheduler.stats()
    assert (stats.pages_held, stats.finished) == (0, 4)


# ---- a result that does not match its plan


def test_results_are_checked_against_the_plan() -> None:
    driver = Driver(limits(depth=2))
    driver.add(message("a", prompt_of(8)))
    first, second = driver.submit(), driver.submit()
    assert first is not None
    assert second is not None
    with pytest.raises(InternalError, match="does not match the plan of step 0"):
        driver.scheduler.apply(first, Result(first.step, (RowResult(5),)))
    with pytest.raises(InternalError, match="is not the oldest step in flight"):
        driver.scheduler.apply(second, Result(second.step, (RowResult(0, (1,)),)))
    with pytest.raises(InternalError, match="returned 2 tokens and 0 scores; expected 1 to 1 tokens and 0 scores"):
        driver.scheduler.apply(first, Result(first.step, (RowResult(0, (1, 2)),)))
    driver = Driver(limits())
    driver.add(embedding("b", prompt_of(8), Pooling.LAST))
    only = driver.submit()
    assert only is not None
    with pytest.raises(InternalError, match="returned none of the hidden states; expected some"):
        driver.scheduler.apply(only, Result(only.step, (RowResult(0),)))
