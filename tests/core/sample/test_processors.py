"""Logits processors compared with their definitions, with slots that start, end and overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from host_transfers import HOST_TRANSFERS

from srv.sample.processors import SampleRow
from srv.sample.state import SamplerState
from srv.sched.plan import Start
from srv.types import RequestSpec, SamplingParams

VOCAB = 12
CPU = torch.device("cpu")


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=16, **options)


def state(*, slots: int = 8, end: Sequence[int] = ()) -> SamplerState:
    return SamplerState(slots, VOCAB, frozenset(end), HOST_TRANSFERS)


def start(
    target: SamplerState,
    slot: int,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    **options: Any,
) -> None:
    request = RequestSpec(id=str(slot), tokens=tuple(prompt), params=params(**options))
    target.start(Start(slot, request, tuple(output)))


def process(target: SamplerState, rows: Sequence[tuple[int, int]], logits: torch.Tensor) -> torch.Tensor:
    work, sample_rows = logits.clone(), [SampleRow(*row) for row in rows]
    for processor in target.processors:
        prepared = processor.prepare(sample_rows)
        if prepared is not None:
            processor.apply(work, prepared)
    return work


def penalised(
    logits: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float,
    frequency: float,
    presence: float,
) -> list[float]:
    """The definitions, token by token."""
    result = logits.tolist()
    for token in set(prompt) | set(output):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= frequency * list(output).count(token) + presence
    return result


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("repetition", "frequency", "presence"), [(1.5, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.9), (0.8, -0.5, 1.1)]
)
def test_penalties_follow_their_definitions(repetition: float, frequency: float, presence: float) -> None:
    target = state()
    prompt, output = [1, 2, 2, 5], [5, 7, 7, 7]
    start(
        target,
        3,
        prompt,
        output,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    start(target, 4, [1, 2], [3])
    logits = random_logits(2)
    got = process(target, [(4, 3), (3, 8)], logits)
    assert torch.equal(got[0], logits[0]), "a row without penalties was changed"
    want = penalised(logits[1], prompt, output, repetition, frequency, presence)
    assert got[1].tolist() == pytest.approx(want, abs=1e-5)


def test_a_sampled_token_counts_in_the_next_step() -> None:
    target = state()
    start(target, 0, [1], frequency_penalty=0.5)
    start(target, 1, [1], repetition_penalty=2.0)
    start(target, 2, [1])
    for drawn in ([4, 4, 4], [4, 6, 4]):
        target.observe([0, 1, 2], torch.tensor(drawn))
    target.observe([1], torch.tensor([8]))
    logits = random_logits(3)
    got = process(target, [(0, 3), (1, 4), (2, 3)], logits)
    assert got[0].tolist() == pytest.approx(penalised(logits[0], [1], [4, 4], 1.0, 0.5, 0.0), abs=1e-5)
    assert got[1].tolist() == pytest.approx(penalised(logits[1], [1], [4, 6, 8], 2.0, 0.0, 0.0), abs=1e-5)
    assert torch.equal(got[2], logits[2])


def test_a_slot_forgets_its_last_request() -> None:
    target = state(end=[9])
    start(target, 0, [1, 2], [3, 3], frequency_penalty=1.0, logit_bias=((4, 5.0),), min_tokens=5)
    process(target, [(0, 4)], random_logits(1))
    target.observe([0], torch.tensor([3]))
    target.end(0)
    start(target, 0, [5], frequency_penalty=1.0)
    logits = random_logits(1)
    assert torch.equal(process(target, [(0, 1)], logits), logits)


def test_a_request_without_penalties_does_not_get_those_of_the_last_one_in_its_slot() -> None:
    target = state()
    start(target, 0, [1, 2], [3], repetition_penalty=2.0, presence_penalty=1.0)
    target.end(0)
    start(target, 0, [5])
    logits = random_logits(1)
    assert torch.equal(process(target, [(0, 1)], logits), logits)


def test_a_retracted_request_resumes_with_its_counts() -> None:
    target = state()
    start(target, 0, [1], frequency_penalty=1.0)
    target.observe([0], torch.tensor([6]))
    target.end(0)
    start(target, 5, [1], [6], frequency_penalty=1.0)
    target.observe([5], torch.tensor([6]))
    logits = random_logits(1)
    got = process(target, [(5, 3)], logits)
    assert got[0].tolist() == pytest.approx(penalised(logits[0], [1], [6, 6], 1.0, 1.0, 0.0), abs=1e-5)


def test_storage_grows_with_the_slots_that_need_it() -> None:
    target = state(slots=20)
    for slot in range(20):
        start(target, slot, [slot % VOCAB], repetition_penalty=2.0)
        target.observe([slot], torch.tensor([(slot + 1) % VOCAB]))
    logits = random_logits(20)
    got = process(target, [(slot, 2) for slot in range(20)], logits)
    for slot in range(20):
        want = penalised(logits[slot], [slot % VOCAB], [(slot + 1) % VOCAB], 2.0, 0.0, 0.0)
        assert got[slot].tolist() == pytest.approx(want, abs=1e-5)


def test_bias_is_added_to_its_row() -> None:
    target = state()
    start(target, 0, [1], logit_bias=((2, 5.0), (3, -100.0), (2, 1.0)))
    start(target, 1, [1])
    logits = torch.zeros(2, VOCAB)
    got = process(target, [(1, 1), (0, 1)], logits)
    assert got[0].tolist() == [0.0] * VOCAB
    assert got[1].tolist() == [0, 0, 6.0, -100.0, *[0] * 8]


def test_end_tokens_are_masked_until_min_tokens_are_out() -> None:
    target = state(end=[10, 99])
    start(target, 0, [1, 1, 1], min_tokens=2, stop_token_ids=(4,))
    logits = random_logits(1)
    for position, masked in ((3, True), (4, True), (5, False)):
        got = process(target, [(0, position)], logits)
        assert (got[0, [4, 10]] == -torch.inf).all().item() is masked
        assert got[0, [0, 1, 2, 3, 5, 6, 7, 8, 9, 11]].isfinite().all()


def test_rows_in_another_order_or_number_get_their_own() -> None:
    """Tensors prepared for one set of rows are not used for another."""
    target = state()
    start(target, 0, [1], repetition_penalty=2.0, logit_bias=((3, 1.0),))
    start(target, 1, [2], repetition_penalty=3.0, logit_bias=((4, 1.0),))
    logits = random_logits(1).expand(3, -1).contiguous()
    both = process(target, [(0, 1), (1, 1)], logits[:2])
    turned = process(target, [(1, 1), (0, 1)], logits[:2])
    assert torch.equal(both.flip(0), turned)
    start(target, 2, [5])
    wider = process(target, [(0, 1), (1, 1), (2, 1)], logits)
    assert torch.equal(wider[:2], both)
    assert torch.equal(wider[2], logits[2])


class Allow:
    """A grammar that allows one token per slot, through the interface of grammar backends."""

    def __init__(self) -> None:
        self.allowed: dict[int, int] = {}
        self.observed: list[tuple[list[int], list[int]]] = []

    def start(self, start: Start, params: SamplingParams) -> None:
        self.allowed[start.slot] = start.tokens[-1]

    def end(self, slot: int) -> None:
        self.allowed.pop(slot, None)

    def prepare(self, rows: Sequence[SampleRow]) -> list[int]:
        return [self.allowed[row.slot] for row in rows]

    def apply(self, logits: torch.Tensor, prepared: list[int]) -> None:
        allowed = logits.gather(1, torch.tensor(prepared)[:, None])
        logits.fill_(-torch.inf).scatter_(1, torch.tensor(prepared)[:, None], allowed)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        self.observed.append((list(slots), tokens.tolist()))


def test_a_custom_processor_is_applied() -> None:
    grammar = Allow()
    target = SamplerState(4, VOCAB, frozenset(), HOST_TRANSFERS, extra=(grammar,))
    start(target, 0, [7])
    start(target, 1, [2])
    assert process(target, [(1, 1), (0, 1)], random_logits(2)).argmax(-1).tolist() == [2, 7]
    target.observe([0], torch.tensor([7]))
    target.end(0)
    assert grammar.observed == [([0], [7])]
    assert grammar.allowed == {1: 2}


def test_a_start_replaces_the_state_of_its_slot_and_ending_an_unknown_slot_is_allowed() -> None:
    target = state()
    target.end(3)
    start(target, 3, [1], logit_bias=((2, 5.0),))
    start(target, 3, [1])
    logits = random_logits(1)
    assert torch.equal(process(target, [(3, 1)], logits), logits)
