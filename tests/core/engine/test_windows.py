"""Models with sliding windows in cache groups of their own: greedy output, prefix hits and memory.

Contexts are several windows long, and pools are so small that pages behind the windows have to be used again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from engine_small import OUTPUT, Small, engine, greedy, make_small, message, messages

from srv.executor.multi_process import MultiProcessExecutor
from srv.testing.engine import CheckedEngine

PAGE = 4
WINDOWS: Mapping[str, tuple[int | None, ...]] = {
    "mistral": (7,),  # all layers
    "qwen2": (None, 9),  # layer 0 has full attention
    "smollm3": (None, 9),
    "gemma3": (None, 6),
    "vaultgemma": (None, 5),  # through transformers
}
LONG = [(place * 37 + 11) % 90 + 3 for place in range(60)]
LATE = 40  # tokens generated after it


@pytest.fixture(scope="module", params=list(WINDOWS))
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def late(small: Small) -> list[int]:
    """The tokens of transformers after LONG."""
    return greedy(small.model, LONG, LATE)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("qwen2", tmp_path_factory.mktemp("mixed"), vocab_size=98)


def windows(made: CheckedEngine) -> tuple[int | None, ...]:
    return tuple(group.window for group in made.context.model.cache_groups)


class RankedEngine(CheckedEngine):
    make_executor = MultiProcessExecutor


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"chunk": 5},
        {"chunk": 3, "overlap": False},
        {"disable_graphs": True},
        {"page_size": 1},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
    ],
    ids=["plain", "chunks", "one step at a time", "eager", "pages of one token", "drafts"],
)
def test_output_several_windows_long_is_that_of_transformers(
    small: Small, late: list[int], flags: dict[str, Any]
) -> None:
    with engine(small, **flags) as made:
        assert windows(made) == WINDOWS[small.model.config.model_type.removesuffix("_text")]
        results = made.generate([message("long", LONG, LATE), *messages(small.prompts)])
    assert [result.tokens for result in results] == [late, *small.tokens]


def test_pages_behind_the_window_are_used_again(mixed: Small) -> None:
    """A request needs up to 5 pages of 4 tokens for its window of 9; the contexts have 25 pages each."""
    expected = greedy(mixed.model, LONG, LATE)
    with engine(mixed, chunk=PAGE, max_running_requests=2, disable_radix_cache=True) as made:
        full, window = made.ready.pages
        assert (full, window) == (256, 2 * 5 + 2)
        results = made.generate([message(str(number), LONG, LATE) for number in range(4)])
        assert [result.tokens for result in results] == [expected] * 4
        assert made.stats().retractions == 0


def test_a_window_that_is_too_small_for_all_retracts_and_loses_nothing(mixed: Small) -> None:
    prompts = [[number + 3, 5, 6] for number in range(4)]
    flags = {"swa_full_tokens_ratio": 0, "schedule_conservativeness": 0.01}
    with engine(mixed, chunk=PAGE, pool=260, **flags) as made:
        assert made.ready.pages[1] == 6  # for one request: 8 tokens before, 3 after the last page, two chunks in flight
        results = made.generate([message(str(number), prompt, LATE) for number, prompt in enumerate(prompts)])
        stats = made.stats()
        assert stats.retractions > 0
        assert stats.pages_held == 0
    assert [result.tokens for result in results] == [greedy(mixed.model, prompt, LATE) for prompt in prompts]


def test_a_prefix_is_hit_in_all_groups(small: Small, late: list[int]) -> None:
    with engine(small) as made:
        (first,) = made.generate([message("first", LONG, LATE)])
        turn = [*LONG, *late, 5, 6, 7]
        expected = greedy(small.model, turn, OUTPUT)
        (second,) = made.generate([message("second", turn)])
        (third,) = made.generate([message("third", LONG[:41])])  # a prefix within the first prompt
        assert first.tokens == late
        assert second.tokens == expected
        assert third.tokens == greedy(small.model, LONG[:41], OUTPUT)
        assert (second.cached_tokens, third.cached_tokens) == (96, 40)


def test_a_prompt_in_chunks_is_shared_before_its_window_moves_on(mixed: Small) -> None:
    with engine(mixed, chunk=8) as made:
        made.generate([message("first", LONG, 2)])
        (branch,) = made.generate([message("branch", [*LONG[:20], 5, 6, 7])])
    assert branch.cached_tokens == 20
    assert branch.tokens == greedy(mixed.model, [*LONG[:20], 5, 6, 7], OUTPUT)


def test_a_prefix_whose_window_was_evicted_is_computed_again(mixed: Small) -> None:
    with engine(mixed, chunk=8, swa_full_tokens_ratio=0) as made:
        assert made.ready.pages[1] == 8
        made.generate([message("first", LONG, 2)])
        made.generate([message("other", LONG[::-1], 2)])  # its pages take the place of those of the window
        (again,) = made.generate([message("again", LONG[:41])])
        assert again.cached_tokens == 0
        assert again.tokens == greedy(mixed.model, LONG[:41], OUTPUT)
        assert made.stats().pages_held == 0


def test_one_pool_for_all_layers_gives_the_same_tokens(small: Small, late: list[int]) -> None:
    with engine(small, disable_hybrid_swa_memory=True) as made:
        assert len(made.ready.pages) == 1
        (result,) = made.generate([message("long", LONG, LATE)])
    assert result.tokens == late


@pytest.fixture
def sharded(mixed: Small) -> Iterator[CheckedEngine]:
    with engine(mixed, kind=RankedEngine, tp_size=2, chunk=5) as made:
        yield made


def test_two_ranks_have_the_same_groups(sharded: CheckedEngine, mixed: Small) -> None:
    assert len(sharded.ready.pages) == 2
    (result,) = sharded.generate([message("long", LONG, LATE)])
    assert result.tokens == greedy(mixed.model, LONG, LATE)
