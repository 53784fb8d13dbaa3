"""Speculative decoding with n-grams in the whole engine: the output is that of the same engine without drafts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from engine_small import Small, SmallModels, engine, make_small, message
from oracle_drafter import oracle

from srv.testing.engine import GenerationResult, LocalEngine
from srv.types import RequestSpec

DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
LONG = 48  # small random models repeat themselves after a while, so that drafts are accepted


def every_kind(small: Small) -> list[RequestSpec]:
    """Requests of all kinds that sampling distinguishes, with prompts that repeat themselves."""
    prompts = [small.prompts[index] * 2 for index in (3, 5, 1, 6, 4, 2)]
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 3, "logprob_token_ids": (5, 9)},
        {"temperature": 0.8, "seed": 11, "logprobs": 1},
        {"temperature": 1.0, "top_p": 0.7, "seed": 12},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.6, "top_k": 5, "seed": 13, "frequency_penalty": 0.3},
        {"logit_bias": ((5, 2.5), (9, -3.0))},
        {"prompt_logprobs": 1, "temperature": 0.5, "seed": 14},
        {"hidden_states": True},
    ]
    requests = [message(f"kind {n}", prompts[n % len(prompts)], LONG, **kind) for n, kind in enumerate(kinds)]
    stops = tuple(range(3, 97, 7))
    requests.append(message("stops", prompts[0], LONG, stop_token_ids=stops, min_tokens=9, temperature=1.0, seed=3))
    requests.append(message("stops at once", prompts[1], LONG, stop_token_ids=stops))
    requests.append(message("short", prompts[2], 2))
    return requests


def outcome(result: GenerationResult) -> tuple[object, ...]:
    logprobs = [(one.token, one.rank, [token for token, _ in one.top]) for one in result.logprobs]
    return result.tokens, result.finish, result.stop_token, logprobs, len(result.vectors), result.error


def assert_same(results: list[GenerationResult], expected: list[GenerationResult]) -> None:
    for number, (one, other) in enumerate(zip(results, expected, strict=True)):
        assert outcome(one) == outcome(other), f"request {number}"
        for a, b in zip(one.logprobs + one.prompt_logprobs, other.logprobs + other.prompt_logprobs, strict=True):
            assert (a.logprob, *a.listed) == pytest.approx((b.logprob, *b.listed), abs=1e-4)


SETUPS = [
    *(("llama", *setup) for setup in product((4, 16), (7, -1), (True, False))),
    *(("qwen3", 16, 7, True), ("mistral", 4, 7, True), ("vaultgemma", 4, 64, True)),
]


@pytest.mark.parametrize(("kind", "page", "chunk", "overlap"), SETUPS)
def test_output_is_that_without_drafts(
    small_models: SmallModels, kind: str, page: int, chunk: int, overlap: bool
) -> None:
    one = small_models(kind)
    requests = every_kind(one)
    with engine(one, page, chunk, overlap, pool=4096) as plain:
        expected = plain.generate(requests)
    with engine(one, page, chunk, overlap, pool=4096, **DRAFTS) as drafting:
        assert_same(drafting.generate(requests), expected)
        hits = drafting.generate(requests)
        assert_same(hits, expected)
    assert any(result.cached_tokens for result in hits)


def tokens_of(results: list[GenerationResult]) -> list[list[int]]:
    return [result.tokens for result in results]


@dataclass(frozen=True)
class Case:
    """A small model, its requests, and their results without drafts."""

    small: Small
    requests: list[RequestSpec]
    expected: list[GenerationResult]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model that the native kernels can run, so that its steps are captured."""
    small = make_small("llama", tmp_path_factory.mktemp("native"), head_dim=16)
    requests = every_kind(small)
    with engine(small, 16, 64, pool=4096) as plain:
        return Case(small, requests, plain.generate(requests))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"disable_overlap_schedule": True},
        {"disable_graphs": True},
        {"attention_backend": "torch_native"},
        {"chunked_prefill_size": 7},
        {"disable_radix_cache": True},
    ],
    ids=str,
)
def test_accepted_drafts_change_no_output(case: Case, flags: dict[str, object]) -> None:
    with engine(case.small, 16, 64, pool=4096, **DRAFTS, **flags) as drafting:
        for wrong in (3, 7, 100):
            oracle(drafting, case.requests, tokens_of(case.expected), wrong)
            assert_same(drafting.generate(case.requests), case.expected)
        before = drafting.stats()
        alone = [request for request in case.requests if request.id == "kind 2"]
        drafting.generate(alone)
        after = drafting.stats()
        assert after.steps - before.steps < LONG // 2
        assert after.drafts_accepted - before.drafts_accepted > LONG // 2


def test_retracted_requests_with_drafts_resume_where_they_were(case: Case) -> None:
    requests = [request for request in case.requests if request.id != "kind 8"]
    expected = [one for one, request in zip(case.expected, case.requests, strict=True) if request.id != "kind 8"]
    flags = {"schedule_conservativeness": 0.01, **DRAFTS}
    with engine(case.small, 16, 64, pool=448, **flags) as drafting:
        oracle(drafting, requests, tokens_of(expected), 5)
        assert_same(drafting.generate(requests), expected)
        assert drafting.stats().retractions > 0


def test_two_steps_are_in_flight_in_steady_decode(case: Case) -> None:
    """The next row is planned while the drafts of the previous one are in flight."""
    with engine(case.small, 16, 64, pool=4096, **DRAFTS) as drafting:
        oracle(drafting, case.requests, tokens_of(case.expected), 4)
        for request in case.requests:
            drafting.send(request)
        drafts_in_flight = 0
        for _ in range(12):
            drafting.step()
            drafts_in_flight += sum(
                row.drafts_in_flight > 0 for plan, _ in drafting.loop._in_flight for row in plan.rows
            )
        assert drafts_in_flight > 12
        drafting.run([request.id for request in case.requests])


def test_the_cost_of_drafts_and_of_jumps_is_measured_where_there_can_be_some(case: Case) -> None:
    arguments = ["--device", "cpu", "--model-path", str(case.small.folder), "--max-total-tokens", "1024"]
    measured = []
    drafts = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"]
    for flags in (drafts, [], ["--disable-graphs"], ["--grammar-backend", "none"]):
        with LocalEngine.launch([*arguments, "--max-running-requests", "4", *flags]) as made:
            measured.append(made._engine.scheduler.limits.step_seconds)
    assert [tokens for tokens, _ in measured[0]] == [1, 4, 16]  # 1 and 4 rows, without and with 3 drafts
    assert [tokens for tokens, _ in measured[1]] == [1, 4]  # the captured ones
    assert measured[2:] == [(), ()]
    assert all(seconds > 0 for each in measured for _, seconds in each)
