"""Forced tokens: what is found ahead changes no mask, whatever part of it the scheduler takes."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from bytes_model import write_model
from grammar_world import World, of

from srv.grammar import budget
from srv.grammar.ahead import MOST_FORCED, Progress, next_masks, only_tokens
from srv.grammar.backend import mask_of


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(write_model(tmp_path_factory.mktemp("bytes")))


def test_the_only_token_of_a_mask() -> None:
    masks = np.stack([mask_of(tokens, 4) for tokens in ((0,), (31,), (32,), (127,), (), (5, 6), (5, 70))])
    assert only_tokens(masks) == [0, 31, 32, 127, None, None, None]


@pytest.fixture(autouse=True)
def _standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No budget of time ends what is followed, however busy the machine is."""
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: 0.0, thread_time=lambda: 0.0))


@pytest.mark.parametrize("seed", range(4))
def test_masks_are_those_without_looking_ahead(world: World, seed: int) -> None:
    """The output gets some of the forced tokens at a time, or one that the mask allows."""
    choice = random.Random(seed)
    text = world.grammar(of("regex", "([a-c] forced (one|two) and quite a long text without a choice; ){4}")).text
    new, ends = world.backend.compile(text), world.facts.end_tokens
    outputs = [Progress(new(), jumps=True), Progress(new(), jumps=True), Progress(new(), jumps=False)]
    sampled = [Progress(new(), jumps=False) for _ in outputs]
    jumped = 0
    while True:
        masks, expected = (next_masks(world.backend, progress, ends) for progress in (outputs, sampled))
        assert (masks == expected).all()
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        if set(allowed.tolist()) <= set(ends):
            break
        ahead = outputs[0].ahead
        assert len(ahead) <= MOST_FORCED
        assert ahead == outputs[1].ahead
        assert not outputs[2].ahead
        taken = ahead[: choice.randint(1, len(ahead))] if ahead else [choice.choice(allowed.tolist())]
        jumped += len(taken) - 1
        assert all(output.accept(taken) for output in (*outputs, *sampled))
    assert jumped > 20
    assert not outputs[0].ahead  # an end token is not followed


def test_a_matcher_that_fails_is_not_followed(world: World) -> None:
    output = Progress(world.backend.compile(world.grammar(of("regex", "abc")).text)(), jumps=True)
    next_masks(world.backend, [output], world.facts.end_tokens)
    assert output.ahead
    assert not output.accept([ord("x")])
    masks = next_masks(world.backend, [output], world.facts.end_tokens)
    assert (masks[0] == mask_of(world.facts.end_tokens, world.backend.words)).all()
    assert not output.ahead
