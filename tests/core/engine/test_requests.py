"""The fields of requests, end to end on a small model: sampling, stop conditions, log-probabilities, prefix sharing.

Every test runs with and without overlap, on one engine each; chunks are so small that most prompts need several.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_small import OUTPUT, Small, engine, greedy, make_small, message, messages
from torch import Tensor

from srv.io.messages import Abort, Finish
from srv.testing.engine import CheckedEngine
from srv.types import FinishReason, TokenLogprob

PAGE, CHUNK = 4, 7
END = 2  # the model's own end token


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def shared(small: Small, request: pytest.FixtureRequest) -> Iterator[CheckedEngine]:
    with engine(small, PAGE, CHUNK, overlap=request.param) as made:
        yield made


@pytest.fixture
def served(shared: CheckedEngine) -> Iterator[CheckedEngine]:
    """The shared engine with an empty cache and no requests; no test may leave requests running."""
    shared.flush()
    yield shared
    shared.check_idle()


# ---- sampling


def test_a_seeded_request_samples_the_same_tokens_in_any_batch(small: Small, served: CheckedEngine) -> None:
    drawn = message("drawn", small.prompts[5], temperature=1.0, seed=42)
    (alone,) = served.generate([drawn])
    others = messages(small.prompts, temperature=1.2, seed=7)
    in_company = served.generate([*others[:4], drawn, *others[4:]])[4]
    after_others = served.generate([*others, drawn])[-1]
    assert in_company.tokens == alone.tokens
    assert after_others.tokens == alone.tokens
    assert alone.tokens != small.tokens[5]


def test_seeds_sample_different_tokens(small: Small, served: CheckedEngine) -> None:
    prompt = small.prompts[5]
    drawn = served.generate(message(f"seed {seed}", prompt, temperature=1.5, seed=seed) for seed in range(6))
    assert len({tuple(result.tokens) for result in drawn}) == 6


def test_sampled_tokens_follow_the_models_distribution(small: Small, served: CheckedEngine) -> None:
    """First tokens of many seeds at temperature 2 and top-k 3, against transformers' probabilities."""
    logits = small.logprobs(small.prompts[4])[-1] / 2
    likely = logits.topk(3)
    draws = 400
    drawn = served.generate(
        message(f"draw {seed}", small.prompts[4], 1, temperature=2.0, top_k=3, seed=seed) for seed in range(draws)
    )
    for token, probability in zip(likely.indices.tolist(), likely.values.softmax(-1).tolist(), strict=True):
        deviation = (draws * probability * (1 - probability)) ** 0.5
        assert abs(sum(result.tokens == [token] for result in drawn) - draws * probability) < 4 * deviation


def test_penalties_count_prompt_and_output(small: Small, served: CheckedEngine) -> None:
    def penalised(prompt: list[int], logits: Tensor, output: list[int]) -> Tensor:
        changed = logits.clone()
        for token in set(prompt + output):
            changed[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
        for token in set(output):
            changed[token] -= 0.6 * output.count(token) + 0.8
        return changed

    prompts = [prompt * 2 for prompt in small.prompts[1:4]]
    params = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.8}
    results = served.generate(messages(prompts, **params))
    for prompt, result in zip(prompts, results, strict=True):
        expected = greedy(small.model, prompt, OUTPUT, lambda logits, output, of=prompt: penalised(of, logits, output))
        assert result.tokens == expected
        assert result.tokens != greedy(small.model, prompt, OUTPUT)


def test_a_bias_forces_a_token_or_forbids_it(small: Small, served: CheckedEngine) -> None:
    first = small.tokens[6][0]
    forced, forbidden = served.generate(
        [
            message("forced", small.prompts[6], logit_bias=((77, 100.0),)),
            message("forbidden", small.prompts[6], logit_bias=((first, -100.0),)),
        ]
    )
    assert forced.tokens == [77] * OUTPUT
    assert first not in forbidden.tokens


# ---- stop conditions


def test_the_models_end_token_ends_a_request_unless_it_is_ignored(small: Small, served: CheckedEngine) -> None:
    bias = ((END, 100.0),)
    ended, ignored = served.generate(
        [
            message("ended", small.prompts[3], logit_bias=bias, ignore_eos=False),
            message("ignored", small.prompts[3], logit_bias=bias, ignore_eos=True),
        ]
    )
    assert (ended.tokens, ended.finish, ended.stop_token) == ([END], FinishReason.STOP, END)
    assert (ignored.tokens, ignored.finish, ignored.stop_token) == ([END] * OUTPUT, FinishReason.LENGTH, None)


def test_a_stop_token_id_ends_a_request_at_its_first_occurrence(small: Small, served: CheckedEngine) -> None:
    sent, expected = [], []
    for number, (prompt, tokens) in enumerate(zip(small.prompts, small.tokens, strict=True)):
        stop = tokens[number]
        sent.append(message(f"stop {number}", prompt, stop_token_ids=(stop,)))
        expected.append((tokens[: tokens.index(stop) + 1], FinishReason.STOP, stop))
    results = served.generate(sent)
    assert [(result.tokens, result.finish, result.stop_token) for result in results] == expected


def test_stop_tokens_are_masked_until_min_tokens(small: Small, served: CheckedEngine) -> None:
    def masked(logits: Tensor, output: list[int]) -> Tensor:
        if len(output) >= 5:
            return logits
        return logits.index_fill(0, torch.tensor([END, first]), float("-inf"))

    first = small.tokens[7][0]
    expected = greedy(small.model, small.prompts[7], OUTPUT, masked)
    stops = {END, first}
    if stops & set(expected):
        expected = expected[: next(at for at, token in enumerate(expected) if token in stops) + 1]
    (result,) = served.generate(
        [message("later", small.prompts[7], min_tokens=5, stop_token_ids=(first,), ignore_eos=False)]
    )
    assert result.tokens == expected
    assert len(result.tokens) >= 5


def test_min_tokens_delay_a_forced_end(small: Small, served: CheckedEngine) -> None:
    (result,) = served.generate(
        [message("held", small.prompts[2], min_tokens=6, logit_bias=((END, 100.0),), ignore_eos=False)]
    )
    assert (len(result.tokens), result.tokens[6:], result.finish) == (7, [END], FinishReason.STOP)
    assert END not in result.tokens[:6]


# ---- log-probabilities


def check_entries(entries: list[TokenLogprob], expected: Tensor, top: int) -> None:
    """expected: log-probabilities, [entries, vocab]."""
    assert len(entries) == len(expected)
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=2e-4)
        assert entry.rank == int((row > row[entry.token] + 1e-4).sum()) + 1
        best = row.topk(top)
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert [float(row[token]) for token, _ in entry.top] == pytest.approx(best.values.tolist(), abs=2e-4)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.5}])
def test_logprobs_are_those_of_the_unmodified_distribution(
    small: Small, served: CheckedEngine, params: dict[str, float | int]
) -> None:
    prompt = small.prompts[6]
    plain, wanted = served.generate(
        [message("plain", prompt, **params), message("wanted", prompt, logprobs=3, **params)]
    )
    rows = small.logprobs(prompt + wanted.tokens)
    assert wanted.tokens == plain.tokens
    assert plain.logprobs == []
    assert [entry.token for entry in wanted.logprobs] == wanted.tokens
    check_entries(wanted.logprobs, rows[len(prompt) - 1 : -1], 3)


@pytest.mark.parametrize("warmed", [False, True], ids=["cold", "after-a-hit"])
@pytest.mark.parametrize("start", [0, 1, 2, 11, 31, 32])
def test_prompt_logprobs_are_complete_whatever_is_cached(
    small: Small, served: CheckedEngine, warmed: bool, start: int
) -> None:
    """All positions from `start`, across chunks; the first token of a prompt has no log-probability."""
    prompt = small.prompts[7]
    if warmed:
        served.generate([message("warm", prompt)])
    sent = message("scored", prompt, prompt_logprobs=2, prompt_logprobs_start=start)
    (result, *_) = served.generate([sent, *messages(small.prompts[:3])])
    first = max(start, 1)
    assert [entry.token for entry in result.prompt_logprobs] == prompt[first:]
    check_entries(result.prompt_logprobs, small.logprobs(prompt)[first - 1 : -1], 2)
    assert result.tokens == small.tokens[7]
    assert result.cached_tokens == (min(first - 1, len(prompt) - 1) // PAGE * PAGE if warmed else 0)


def test_log_probabilities_of_given_tokens_for_prompt_and_output(small: Small, served: CheckedEngine) -> None:
    prompt, ids = small.prompts[5], (9, 0, 9)
    sent = message("scored", prompt, logprobs=0, prompt_logprobs=0, logprob_token_ids=ids)
    plain = message("plain", prompt, logprobs=1)
    result, other = served.generate([sent, plain])
    rows = small.logprobs(prompt + result.tokens)
    entries = result.prompt_logprobs + result.logprobs
    assert len(entries) == len(prompt) - 1 + len(result.tokens)
    for entry, row in zip(entries, rows, strict=False):
        assert entry.listed == pytest.approx([float(row[token]) for token in ids], abs=1e-3)
    assert [entry.listed for entry in other.logprobs] == [()] * len(other.tokens)


def test_a_prompt_can_be_scored_without_generating(small: Small, served: CheckedEngine) -> None:
    prompt = small.prompts[7]
    (result,) = served.generate([message("scored", prompt, 0, prompt_logprobs=0)])
    assert (result.tokens, result.finish) == ([], FinishReason.LENGTH)
    check_entries(result.prompt_logprobs, small.logprobs(prompt)[:-1], 0)


def test_a_prompt_of_one_token_has_no_logprobs(small: Small, served: CheckedEngine) -> None:
    (result,) = served.generate([message("scored", small.prompts[0], prompt_logprobs=3)])
    assert (result.prompt_logprobs, result.tokens) == ([], small.tokens[0])


# ---- sharing


def test_equal_prompts_share_the_pages_of_their_prefix(small: Small, served: CheckedEngine) -> None:
    prompt = small.prompts[7]
    served.generate([message("first", prompt, 1)])
    before = served.stats()
    sent = [message(f"copy {seed}", prompt, temperature=1.0, seed=seed) for seed in range(4)]
    for one in sent:
        served.send(one)
    served.step()
    running = served.stats()
    served.run([one.id for one in sent])
    shared_pages = (len(prompt) - 1) // PAGE
    assert [served.results[one.id].cached_tokens for one in sent] == [shared_pages * PAGE] * 4
    assert before.pages_cached == len(prompt) // PAGE
    most = shared_pages + 4 * (-(-(len(prompt) + OUTPUT) // PAGE) - shared_pages)
    assert shared_pages < running.pages_held <= most
    assert len({tuple(served.results[one.id].tokens) for one in sent}) == 4


def test_namespaces_share_nothing(small: Small, served: CheckedEngine) -> None:
    prompt = small.prompts[7]
    results = []
    for namespace in ("", "tenant", "", "tenant"):
        results += served.generate([message("same", prompt, namespace=namespace)])
    assert [result.cached_tokens for result in results] == [0, 0, 32, 32]
    assert [result.tokens for result in results] == [small.tokens[7]] * 4


# ---- abort and finish


def test_an_aborted_request_is_reported_and_frees_its_pages(small: Small, served: CheckedEngine) -> None:
    sent = messages(small.prompts)
    for one in sent:
        served.send(one)
    for _ in range(9):
        served.step()
    served.send(Abort(["request 1", "request 7", "no such request"]))
    served.run([one.id for one in sent])
    for number in (1, 7):
        result = served.results[f"request {number}"]
        assert result.finish is FinishReason.ABORT
        assert result.tokens == small.tokens[number][: len(result.tokens)]
    for number in (0, 2, 3, 4, 5, 6):
        assert served.results[f"request {number}"].tokens == small.tokens[number]


def test_a_request_is_aborted_at_any_step_of_its_life(small: Small, served: CheckedEngine) -> None:
    for steps in range(OUTPUT + 6):
        served.send(message("short-lived", small.prompts[7]))
        served.send(message("companion", small.prompts[4]))
        for _ in range(steps):
            served.step()
        served.send(Abort(["short-lived"]))
        served.run(["short-lived", "companion"])
        result = served.results["short-lived"]
        assert result.finish in (FinishReason.ABORT, FinishReason.LENGTH)
        assert result.tokens == small.tokens[7][: len(result.tokens)]
        assert served.results["companion"].tokens == small.tokens[4]


def test_a_finished_request_sends_nothing_and_its_prefix_stays_cached(small: Small, served: CheckedEngine) -> None:
    """The API process found a stop string: the engine sends no further Output, and the prefix can be hit."""
    served.send(message("finished", small.prompts[7]))
    served.send(message("companion", small.prompts[4]))
    while len(served.results["finished"].tokens) < 3:
        served.step()
    served.send(Finish("finished"))
    served.run(["companion"])
    result = served.results["finished"]
    assert (result.tokens, result.finish) == (small.tokens[7][: len(result.tokens)], None)
    assert 3 <= len(result.tokens) <= 4
    (again,) = served.generate([message("again", small.prompts[7])])
    assert (again.tokens, again.cached_tokens) == (small.tokens[7], 32)


def test_abort_all_empties_the_engine(small: Small, served: CheckedEngine) -> None:
    """More requests than slots: some run, some wait."""
    sent = [message(f"one of many {number}", small.prompts[number % 8]) for number in range(24)]
    for one in sent:
        served.send(one)
    for _ in range(4):
        served.step()
    served.send(Abort(None))
    served.run([one.id for one in sent])
    assert {served.results[one.id].finish for one in sent} == {FinishReason.ABORT}


def test_a_request_that_can_never_run_is_refused_with_the_reason(small: Small, served: CheckedEngine) -> None:
    sent = [
        message("empty", []),
        message("too long", [5] * 256),
        message("fits", small.prompts[4]),
    ]
    empty, too_long, fits = served.generate(sent)
    assert [result.error and result.error[0] for result in (empty, too_long)] == [
        "empty_prompt",
        "context_length_exceeded",
    ]
    assert [result.finish for result in (empty, too_long)] == [FinishReason.ERROR] * 2
    assert fits.tokens == small.tokens[4]
