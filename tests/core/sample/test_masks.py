"""`allowed_token_ids` and banned sequences compared with their definitions, with and without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from host_transfers import HOST_TRANSFERS

from srv.sample.processors import SampleRow
from srv.sample.state import SamplerState
from srv.sample.verify import DraftRows, DraftShape
from srv.sched.plan import Start
from srv.types import RequestSpec, SamplingParams

VOCAB = 8
Banned = Sequence[Sequence[int]]


def state() -> SamplerState:
    return SamplerState(8, VOCAB, frozenset(), HOST_TRANSFERS)


def start(
    target: SamplerState, slot: int, *, output: Sequence[int] = (), banned: Banned = (), allowed: Sequence[int] = ()
) -> None:
    sequences = tuple(map(tuple, banned))
    params = SamplingParams(max_tokens=16, banned=sequences, allowed_token_ids=tuple(allowed))
    target.start(Start(slot, RequestSpec(id=str(slot), tokens=(1, 2), params=params), tuple(output)))


def masked_tokens(output: Sequence[int], banned: Banned, allowed: Sequence[int] = ()) -> set[int]:
    """The definition."""
    masked = {token for token in range(VOCAB) if allowed and token not in allowed}
    for *before, last in banned:
        if list(output)[len(output) - len(before) :] == before and len(output) >= len(before):
            masked.add(last)
    return masked


def found(logits: torch.Tensor) -> list[set[int]]:
    return [{token for token, value in enumerate(row) if value == float("-inf")} for row in logits.tolist()]


def process(target: SamplerState, slots: Sequence[int]) -> list[set[int]]:
    logits = torch.zeros(len(slots), VOCAB)
    rows = [SampleRow(slot, 5) for slot in slots]
    for processor in target.processors:
        if (prepared := processor.prepare(rows)) is not None:
            processor.apply(logits, prepared)
    assert torch.equal(logits[~logits.isinf()], torch.zeros(int((~logits.isinf()).sum())))
    return found(logits)


def process_drafts(target: SamplerState, slots: Sequence[int], fed: Sequence[Sequence[int]]) -> list[set[int]]:
    """`fed[i]`: the last known token of slots[i], then its drafts."""
    shape = DraftShape([len(tokens) for tokens in fed], HOST_TRANSFERS)
    drafts = DraftRows(
        shape, torch.tensor([token for tokens in fed for token in tokens]), torch.tensor([5] * len(slots))
    )
    rows = [SampleRow(slot, 5 + at, at) for slot, tokens in zip(slots, fed, strict=True) for at in range(len(tokens))]
    logits = torch.zeros(len(rows), VOCAB)
    for processor in target.processors:
        if (prepared := processor.prepare(rows)) is not None:
            processor.apply_drafts(logits, prepared, drafts)
    return found(logits)


def test_only_allowed_tokens_remain() -> None:
    target = state()
    start(target, 2, allowed=[1, 5])
    start(target, 3)
    start(target, 4, allowed=[0])
    assert process(target, [3, 4, 2]) == [set(), set(range(1, 8)), {0, 2, 3, 4, 6, 7}]
    target.end(4)
    start(target, 4, allowed=[7])
    assert process(target, [3, 4, 2])[1] == set(range(7)), "the slot still has the mask of its last request"
    assert process_drafts(target, [2, 3], [[1, 1], [1]]) == [{0, 2, 3, 4, 6, 7}] * 2 + [set()]


def test_the_last_token_of_a_sequence_is_masked_after_the_others() -> None:
    target = state()
    banned = [[3], [1, 2], [1, 1, 4]]
    start(target, 0, banned=banned)
    start(target, 1, output=[0, 1, 1], banned=banned)  # resumes after a retraction
    start(target, 2)
    outputs: dict[int, list[int]] = {0: [], 1: [0, 1, 1], 2: []}
    draw = random.Random(1)
    for _ in range(30):
        assert process(target, [0, 1, 2]) == [
            masked_tokens(outputs[0], banned),
            masked_tokens(outputs[1], banned),
            set(),
        ]
        drawn = [draw.choice([0, 1, 1, 2]) for _ in outputs]
        target.observe([0, 1, 2], torch.tensor(drawn))
        for slot, token in enumerate(drawn):
            outputs[slot].append(token)


def test_a_longer_sequence_of_another_request_leaves_the_shorter_ones_as_they_are() -> None:
    target = state()
    start(target, 0, banned=[[1, 2]])
    target.observe([0], torch.tensor([1]))
    start(target, 1, banned=[[5, 5, 5, 5, 6]], output=[5, 5, 5])
    assert process(target, [0, 1]) == [{2}, set()]
    target.observe([1, 0], torch.tensor([5, 0]))
    assert process(target, [0, 1]) == [set(), {6}]
    target.end(1)
    for slot in range(1, 8):
        start(target, slot, banned=[[slot, 0]], output=[slot])
    assert process(target, range(8)) == [set(), *[{0}] * 7]


def test_drafts_count_as_output_and_only_accepted_ones_stay() -> None:
    target = state()
    banned = [[1, 2], [1, 1, 3], [6]]
    outputs = {0: [1], 1: [0], 2: [1, 1]}
    for slot, output in outputs.items():
        start(target, slot, output=output, banned=banned if slot < 2 else ())
    draw = random.Random(2)
    for _ in range(30):
        fed = [[output[-1], *(draw.choice([1, 1, 0]) for _ in range(draw.randrange(4)))] for output in outputs.values()]
        expected = [
            masked_tokens([*outputs[slot], *tokens_fed[1 : at + 1]], banned) if slot < 2 else set()
            for slot, tokens_fed in enumerate(fed)
            for at in range(len(tokens_fed))
        ]
        assert process_drafts(target, [0, 1, 2], fed) == expected
        slots, tokens, kept = [], [], []
        for slot, tokens_fed in enumerate(fed):
            accepted = draw.randint(1, len(tokens_fed))
            sampled = [*tokens_fed[1:accepted], draw.choice([0, 1]), *[7] * (len(tokens_fed) - accepted)]
            slots += [slot] * len(tokens_fed)
            tokens += sampled
            kept += [at < accepted for at in range(len(tokens_fed))]
            outputs[slot] += sampled[:accepted]
        target.observe_kept(slots, torch.tensor(tokens), torch.tensor(kept))
