"""The sampler: the order of its parts, the result of each row, and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from host_transfers import HOST_TRANSFERS

from srv.errors import InternalError
from srv.platform.interface import SamplingBatch
from srv.sample.logprobs import listed_tokens, score
from srv.sample.noise import uniform
from srv.sample.sampler import SampledToken, Sampler, SampleRow, SamplerState
from srv.sched.plan import Start
from srv.types import RequestSpec, SamplingParams

VOCAB = 40


class FakeBackend:
    """Inverse transform sampling in vocabulary order at temperature 1, argmax at 0; records its batches."""

    def __init__(self) -> None:
        self.batches: list[SamplingBatch] = []

    def sample(self, batch: SamplingBatch) -> torch.Tensor:
        self.batches.append(batch)
        cumulative = batch.logits.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(cumulative, batch.uniform[:, None], right=True).squeeze(1)
        return torch.where(batch.temperature == 0, batch.logits.argmax(-1), drawn)


class GreedyBackend(FakeBackend):
    """Implements `most_likely`, and records its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(logits)
        finite = logits.float().amax(-1).isfinite()
        return logits.argmax(-1).masked_fill(~finite, 0), finite


class World:
    def __init__(self, *asks: dict[str, Any], backend: FakeBackend | None = None) -> None:
        self.backend = backend or FakeBackend()
        self.state = SamplerState(16, VOCAB, frozenset({0}), HOST_TRANSFERS)
        self.sampler = Sampler(self.backend, self.state)
        for slot, ask in enumerate(asks):
            self.start(slot, **ask)

    def start(self, slot: int, **ask: Any) -> None:
        request = RequestSpec(id=str(slot), tokens=(1, 2, 3), params=SamplingParams(max_tokens=9, **ask))
        self.state.start(Start(slot, request))

    def sample(self, logits: torch.Tensor, rows: Sequence[tuple[int, int]]) -> list[SampledToken]:
        return self.sampler.sample(logits, [SampleRow(*row) for row in rows]).to_host()


def random_logits(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)


GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_greedy_rows_take_the_most_likely_token(dtype: torch.dtype) -> None:
    world, logits = World(GREEDY, GREEDY), random_logits(2, dtype)
    drawn = world.sample(logits, [(0, 3), (1, 3)])
    assert [one.token for one in drawn] == logits.argmax(-1).tolist()
    assert world.backend.batches[0].all_greedy
    assert world.backend.batches[0].logits.dtype == torch.float32


def test_a_backend_with_most_likely_gets_unmodified_logits_of_greedy_rows() -> None:
    backend, logits = GreedyBackend(), random_logits(3, torch.bfloat16)
    world = World(GREEDY, GREEDY, {**GREEDY, "logprobs": 1}, backend=backend)
    logits[1, 7] = torch.nan
    drawn = world.sample(logits, [(0, 3), (1, 3), (2, 3)])
    assert backend.seen[0] is logits
    assert [one.token for one in drawn if one.error is None] == logits[[0, 2]].argmax(-1).tolist()
    assert [one.error is not None for one in drawn] == [False, True, False]
    assert drawn[2].logprob is not None
    assert not backend.batches


@pytest.mark.parametrize(
    "other", [{"seed": 3}, {**GREEDY, "logit_bias": ((4, 50.0),)}], ids=["a row that is drawn", "a processor at work"]
)
def test_most_likely_is_not_used_in_other_batches(other: dict[str, Any]) -> None:
    backend = GreedyBackend()
    world = World(GREEDY, other, backend=backend)
    world.sample(random_logits(2), [(0, 3), (1, 3)])
    assert not backend.seen
    assert len(backend.batches) == 1
    world.sample(random_logits(1), [(0, 4)])
    assert len(backend.seen) == 1


def test_noise_of_a_row_is_that_of_its_seed_and_position() -> None:
    world = World({"seed": 11}, GREEDY, {"seed": 12})
    for step in range(3):
        world.sample(random_logits(3), [(2, 70 + step), (1, 3), (0, 62 + step)])
        got = world.backend.batches[-1].uniform.tolist()
        assert [got[0], got[2]] == uniform([12, 11], [70 + step, 62 + step]).tolist()


def test_equal_seed_and_position_sample_equal_tokens_in_any_batch() -> None:
    world, logits = World({"seed": 5}, {"seed": 6}, {"seed": 5}), random_logits(1)
    alone = world.sample(logits, [(0, 8)])[0].token
    among = world.sample(logits.expand(3, -1), [(1, 8), (2, 8), (0, 9)])[1].token
    assert alone == among


def test_batch_says_which_filters_are_unused() -> None:
    world = World(
        {"temperature": 0.0, "top_k": 7, "top_p": 0.5, "min_p": 0.5},
        {"top_k": VOCAB + 5},
        {"top_k": 3, "temperature": 0.5},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.1},
    )
    world.sample(random_logits(2), [(0, 3), (1, 3)])
    batch = world.backend.batches[-1]
    flags = (batch.all_greedy, batch.any_top_k, batch.any_top_p, batch.any_min_p, batch.largest_top_k)
    assert flags == (False, False, False, False, 0), "filters of greedy rows do not count"
    world.sample(random_logits(4), [(0, 4), (1, 4), (2, 4), (3, 4)])
    batch = world.backend.batches[-1]
    flags = (batch.all_greedy, batch.any_top_k, batch.any_top_p, batch.any_min_p, batch.largest_top_k)
    assert flags == (False, True, True, True, 6)
    assert batch.temperature.tolist() == [0.0, 1.0, 0.5, 1.0]
    assert batch.top_k.tolist() == [7, VOCAB, 3, 6]
    assert batch.top_p.tolist() == pytest.approx([0.5, 1.0, 1.0, 0.9])
    assert batch.min_p.tolist() == pytest.approx([0.5, 0.0, 0.0, 0.1])


def test_parameters_follow_the_slot_not_the_row() -> None:
    world = World({"temperature": 0.5}, {"temperature": 2.0})
    rows = [(0, 3), (1, 3)]
    world.sample(random_logits(2), rows)
    world.sample(random_logits(2), rows[::-1])
    assert world.backend.batches[-1].temperature.tolist() == [2.0, 0.5]
    world.state.end(0)
    world.start(0, temperature=0.25)
    world.sample(random_logits(2), rows)
    assert world.backend.batches[-1].temperature.tolist() == [0.25, 2.0]


def test_device_tensors_are_kept_while_the_rows_stay() -> None:
    world = World({}, {})
    for position in (3, 4):
        world.sample(random_logits(2), [(0, position), (1, position)])
    first, second = world.backend.batches
    assert first.temperature is second.temperature


def test_sampled_tokens_count_before_the_host_reads_them() -> None:
    """A frequency penalty lowers the winner in every step, although no result is read by the host."""
    world = World({"temperature": 0.0, "frequency_penalty": 2.0}, GREEDY)
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 8] = 1.0, 0.5
    unread = [world.sampler.sample(logits, [SampleRow(0, at), SampleRow(1, at)]) for at in (3, 4, 5)]
    tokens = [[one.token for one in batch.to_host()] for batch in unread]
    assert [first for first, _ in tokens] == [7, 8, 0]
    assert [second for _, second in tokens] == [7, 7, 7]


def test_logits_of_the_caller_are_not_changed() -> None:
    world, logits = World({"logit_bias": ((1, 100.0),)}), random_logits(1)
    before = logits.clone()
    world.sample(logits, [(0, 3)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_finite_logits_fails_alone(bad: float, temperature: float) -> None:
    ask = {"temperature": temperature, "seed": 3, "logprobs": 2}
    world, logits = World(ask, ask, ask), random_logits(3)
    rows = [(0, 5), (1, 5), (2, 5)]
    want = world.sample(logits, rows)
    broken = logits.clone()
    broken[1, slice(None) if bad == -math.inf else 9] = bad
    batch = world.sampler.sample(broken, [SampleRow(*row) for row in rows])
    got = batch.to_host()
    assert got[1].error is not None
    assert got[1].error[0] == "non_finite_logits"
    assert got[1].logprob is None
    assert (got[0], got[2]) == (want[0], want[2])
    assert batch.tokens[1] == 0, "the next step must be fed a token of the vocabulary"


def test_logprobs_are_the_models_own() -> None:
    """Before bias, penalties and temperature; only for the rows that request them."""
    world = World(
        {"logprobs": 3, "temperature": 0.0, "logit_bias": ((4, 100.0),)}, {}, {"logprobs": 0, "temperature": 0.0}
    )
    logits = random_logits(3, torch.bfloat16)
    forced, silent, plain = world.sample(logits, [(0, 3), (1, 3), (2, 3)])
    want = logits.double().log_softmax(-1)
    assert silent.logprob is None
    assert forced.token == 4
    assert forced.logprob is not None
    assert forced.logprob.token == 4
    assert forced.logprob.logprob == pytest.approx(want[0, 4].item(), abs=1e-5)
    assert forced.logprob.rank == 1 + (want[0] > want[0, 4]).sum()
    assert [value for _, value in forced.logprob.top] == pytest.approx(want[0].topk(3).values.tolist(), abs=1e-5)
    assert all(want[0, token].item() == pytest.approx(value, abs=1e-5) for token, value in forced.logprob.top)
    assert plain.logprob is not None
    assert (plain.logprob.rank, plain.logprob.top) == (1, ())


def test_rows_that_do_not_match_the_logits_are_an_internal_error() -> None:
    with pytest.raises(InternalError, match="2 rows of logits for 1 rows"):
        World({}).sample(random_logits(2), [(0, 3)])
    with pytest.raises(InternalError, match="slot 5, but the slot has no request"):
        World({}).sample(random_logits(1), [(5, 3)])


class TestScore:
    def test_values_ranks_and_alternatives(self) -> None:
        logits, targets = random_logits(5), torch.tensor([0, 7, 39, 7, 2])
        want = logits.double().log_softmax(-1)
        for row, scored in enumerate(score(logits, targets, HOST_TRANSFERS, 4).to_host()):
            assert scored.token == targets[row]
            assert scored.logprob == pytest.approx(want[row, scored.token].item(), abs=1e-5)
            assert scored.rank == 1 + (want[row] > want[row, scored.token]).sum()
            assert [token for token, _ in scored.top] == want[row].topk(4).indices.tolist()

    def test_each_token_with_its_own_number_of_alternatives(self) -> None:
        scores = score(random_logits(3), torch.tensor([1, 2, 3]), HOST_TRANSFERS, [0, 2, 100]).to_host()
        assert [len(one.top) for one in scores] == [0, 2, VOCAB]

    def test_each_token_with_its_own_list_of_others(self) -> None:
        logits, lists = random_logits(3), [(7, 0), (), (39, 39, 2)]
        want = logits.double().log_softmax(-1)
        listed = listed_tokens(lists, HOST_TRANSFERS)
        scores = score(logits, torch.tensor([1, 2, 3]), HOST_TRANSFERS, 1, listed).to_host()
        for row, ids in enumerate(lists):
            assert scores[row].listed == pytest.approx(want[row, list(ids)].tolist(), abs=1e-5)
        assert listed_tokens([(), ()], HOST_TRANSFERS) is None

    def test_chunks_join_seamlessly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits, targets = random_logits(7), torch.arange(7)
        listed = listed_tokens([(row, 5) for row in range(7)], HOST_TRANSFERS)
        whole = score(logits, targets, HOST_TRANSFERS, 3, listed).to_host()
        monkeypatch.setattr("srv.sample.logprobs._CHUNK_ELEMENTS", 3 * VOCAB)
        assert score(logits, targets, HOST_TRANSFERS, 3, listed).to_host() == whole

    def test_among_equals_the_scored_token_is_listed(self) -> None:
        logits = torch.zeros(VOCAB, VOCAB)
        for scored in score(logits, torch.arange(VOCAB), HOST_TRANSFERS, 2).to_host():
            assert scored.rank == 1
            assert scored.token in [token for token, _ in scored.top]
            assert [token for token, _ in scored.top] == sorted(token for token, _ in scored.top)

    def test_masked_logits_and_no_rows(self) -> None:
        logits = random_logits(1)
        logits[0, 20:] = -torch.inf
        (scored,) = score(logits, torch.tensor([30]), HOST_TRANSFERS).to_host()
        assert scored.logprob == -math.inf
        assert score(logits[:0], torch.zeros(0, dtype=torch.int64), HOST_TRANSFERS, 2).to_host() == ()
