"""Models with recurrent layers: greedy output, prefix hits from snapshots of states, retraction, and memory."""

from __future__ import annotations

from typing import Any

import pytest
from engine_small import OUTPUT, Small, engine, greedy, make_small, message, messages
from models_small import SHARED_EXPERTS

from srv.io.messages import Abort
from srv.testing.engine import CheckedEngine

STATE_SPACE = ("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "minimax")
LONG = [(place * 37 + 11) % 90 + 3 for place in range(75)]  # longer than a chunk of the delta rule


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("qwen3_next", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def after_long(small: Small) -> list[int]:
    """The tokens of transformers after LONG."""
    return greedy(small.model, LONG, OUTPUT)


def kept(made: CheckedEngine) -> tuple[int, int]:
    """Snapshots in the prefix cache, and those that requests hold."""
    stats = made.stats()
    assert stats.state_slots_cached + stats.state_slots_held <= stats.state_slots_total
    return stats.state_slots_cached, stats.state_slots_held


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"chunk": 5},
        {"chunk": 3, "overlap": False},
        {"disable_graphs": True},
        {"page_size": 1},
        {"disable_radix_cache": True, "max_running_requests": 3},
    ],
    ids=["plain", "chunks", "one step at a time", "eager", "pages of one token", "three requests at a time"],
)
def test_output_is_that_of_transformers(small: Small, after_long: list[int], flags: dict[str, Any]) -> None:
    with engine(small, **flags) as made:
        results = made.generate([message("long", LONG), *messages(small.prompts)])
        assert kept(made)[1] == 0
        stats = made.stats()
        assert (stats.replayed_steps > 0) == bool(made.ready.graph_rows)
        assert (stats.overlapped_steps > 0) == flags.get("overlap", True)
    assert [result.tokens for result in results] == [after_long, *small.tokens]


def test_experts_in_a_batch_and_chunks(tmp_path: Any) -> None:
    sparse = make_small("qwen3_next", tmp_path, **SHARED_EXPERTS)
    with engine(sparse, chunk=7) as made:
        assert [result.tokens for result in made.generate(messages(sparse.prompts))] == sparse.tokens


OTHERS = (
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "recurrent_gemma",
    "olmo_hybrid",
    *STATE_SPACE,
)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_in_a_batch_in_chunks_and_after_a_prefix(kind: str, tmp_path: Any) -> None:
    other = make_small(kind, tmp_path)
    expected = greedy(other.model, LONG, OUTPUT)
    with engine(other, chunk=7) as made:
        results = made.generate([message("long", LONG), *messages(other.prompts)])
        assert [result.tokens for result in results] == [expected, *other.tokens]
        (again,) = made.generate([message("again", LONG)])
        turn = [*LONG, *expected, 5, 6, 7]
        (second,) = made.generate([message("second", turn)])
    assert [again.tokens, second.tokens] == [expected, greedy(other.model, turn, OUTPUT)]
    assert [again.cached_tokens, second.cached_tokens] == [72, 72]


@pytest.mark.parametrize("kind", ["granitemoehybrid", "falcon_h1", "minimax"])
def test_states_beside_keys_are_measured_and_computed_again_after_a_retraction(kind: str, tmp_path: Any) -> None:
    other = make_small(kind, tmp_path)
    expected = greedy(other.model, LONG, OUTPUT)
    flags: dict[str, Any] = {"chunk": 16, "max_running_requests": 6, "mamba_track_interval": 8}
    with engine(other, pool=148, schedule_conservativeness=0.01, **flags) as made:
        (line,) = [each for each in made.ready.memory[0] if each.name == "recurrent states"]
        assert line.predicted == line.measured > 0
        results = made.generate(messages([LONG, *other.prompts[4:]]))
        assert made.stats().retractions > 0
        assert kept(made)[1] == 0
    assert [result.tokens for result in results] == [expected, *other.tokens[4:]]


def test_a_prefix_goes_on_from_its_snapshot(small: Small, after_long: list[int]) -> None:
    with engine(small) as made:
        (first,) = made.generate([message("first", LONG)])
        (again,) = made.generate([message("again", LONG)])
        turn = [*LONG, *after_long, 5, 6, 7]
        (second,) = made.generate([message("second", turn)])
        assert [first.tokens, again.tokens] == [after_long] * 2
        assert second.tokens == greedy(small.model, turn, OUTPUT)
        assert [each.cached_tokens for each in (first, again, second)] == [0, 72, 72]


def test_a_branch_is_saved_when_it_is_first_seen(small: Small) -> None:
    """The second prompt leaves the first one where there is no snapshot, so only the third one begins there."""
    prompts = [[*LONG[:41], token, 4, 5, 6, 7] for token in (90, 91, 92)]
    with engine(small) as made:
        made.generate([message("first", LONG, 2)])
        results = [made.generate([message(str(number), prompt)])[0] for number, prompt in enumerate(prompts)]
    assert [each.cached_tokens for each in results] == [0, 40, 40]
    assert [each.tokens for each in results] == [greedy(small.model, prompt, OUTPUT) for prompt in prompts]


def test_equal_prompts_share_one_computation(small: Small, after_long: list[int]) -> None:
    with engine(small) as made:
        results = made.generate([message(str(number), LONG) for number in range(4)])
    assert [each.tokens for each in results] == [after_long] * 4
    assert [each.cached_tokens for each in results] == [0, 72, 72, 72]


def test_states_of_outputs_are_saved_at_intervals(small: Small) -> None:
    expected = greedy(small.model, LONG[:9], 40)
    turn = [*LONG[:9], *expected, 5]
    for interval, cached in ((8, 48), (16, 40), (100, 8)):
        with engine(small, mamba_track_interval=interval) as made:
            made.generate([message("first", LONG[:9], 40)])
            (second,) = made.generate([message("second", turn)])
            assert second.cached_tokens == cached
            assert second.tokens == greedy(small.model, turn, OUTPUT)


def test_without_room_for_snapshots_no_hit_is_claimed(small: Small, after_long: list[int]) -> None:
    with engine(small, max_mamba_cache_size=16) as made:
        assert kept(made) == (0, 0)
        results = [made.generate([message(str(number), LONG)])[0] for number in range(2)]
    assert [each.cached_tokens for each in results] == [0, 0]
    assert [each.tokens for each in results] == [after_long] * 2


def test_the_snapshot_used_last_is_evicted_last(small: Small) -> None:
    prompts = [prompt for prompt in small.prompts if len(prompt) > 9]
    with engine(small, max_mamba_cache_size=18) as made:
        for number, prompt in enumerate(prompts):
            made.generate([message(f"{number}", prompt, 2)])
        assert kept(made) == (2, 0)
        hits = [made.generate([message(f"again {number}", prompts[number], 2)])[0] for number in (-1, -2)]
    assert [hit.cached_tokens for hit in hits] == [(len(prompts[place]) - 1) // 4 * 4 for place in (-1, -2)]


def test_a_retracted_request_computes_its_states_again(small: Small, after_long: list[int]) -> None:
    with engine(small, pool=148, schedule_conservativeness=0.01, chunk=16, max_running_requests=6) as made:
        prompts = [LONG, *small.prompts[4:]]
        results = made.generate(messages(prompts))
        assert made.stats().retractions > 0
        assert kept(made)[1] == 0
    assert [result.tokens for result in results] == [after_long, *small.tokens[4:]]


def test_an_aborted_request_leaves_nothing_behind(small: Small, after_long: list[int]) -> None:
    with engine(small, chunk=16) as made:
        requests = [message("aborted", LONG), message("kept", [*LONG, 5])]
        for each in requests:
            made.send(each)
        for _ in range(3):
            made.step()
        made.send(Abort(["aborted"]))
        made.run(["aborted", "kept"])
        assert kept(made)[1] == 0
        (again,) = made.generate([message("again", LONG)])
    assert again.tokens == after_long


def test_states_are_in_the_budget_and_measured_as_predicted(small: Small) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        with engine(small, mamba_ssm_dtype=dtype, max_mamba_cache_size=20) as made:
            (line,) = [each for each in made.ready.memory[0] if each.name == "recurrent states"]
            assert line.predicted == line.measured
            sizes[dtype] = line.measured
            (result,) = made.generate([message("one", LONG)])
            assert len(result.tokens) == OUTPUT
    convolution, state = 56 * 4 * 4, 4 * 8 * 6 * 4  # bytes of one layer and request, in float32
    assert sizes == {"float32": 21 * 3 * (convolution + state), "bfloat16": 21 * 3 * (convolution + state // 2)}
