"""What grammars may take of a step: masks and bytes that are looked ahead, and the time of one request's masks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from every import every

from srv.errors import GrammarError
from srv.grammar import budget, llguidance_backend
from srv.grammar.ahead import MOST_FORCED, Progress, next_masks
from srv.grammar.backend import GrammarContext, JsonSpacing, Masks
from srv.grammar.child import TRIED_TOKENS, try_out
from srv.grammar.llguidance_backend import make_backend
from srv.grammar.source import GrammarSource
from srv.types import Vocabulary

END = 383
# The longest token is of 128 bytes, as in vocabularies with runs of spaces.
TOKENS = [*(bytes([byte]) for byte in range(256)), *(b" " * count for count in range(2, 129))]


class ByteCount(llguidance_backend._Tokens):
    looked_at = 0

    def _split_now(self, data: bytes) -> list[int]:
        ByteCount.looked_at += len(data)
        return super()._split_now(data)


class Forced:
    """A backend that always allows one token only (none after `dead_after`), and its matchers."""

    words = 1
    failure = ""

    def __init__(self, dead_after: int = 10**9) -> None:
        self.masks, self.accepted, self.dead_after = 0, 0, dead_after

    def fill(self, matchers: Sequence[Any], masks: Masks) -> None:
        self.masks += len(matchers)
        masks[:] = 2 if self.accepted < self.dead_after else 0

    def accept(self, tokens: Sequence[int]) -> bool:
        self.accepted += len(tokens)
        return True


@pytest.mark.parametrize("pattern", ["a{49000}", "é{9000}b", "(ab ){9000}"])
def test_a_step_looks_at_few_bytes_of_a_long_forced_text(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """It was split into tokens as a whole for each of the masks of a step."""
    monkeypatch.setattr(budget, "AHEAD_SECONDS", 60.0)
    monkeypatch.setattr(llguidance_backend, "_Tokens", ByteCount)
    vocabulary = Vocabulary(b"".join(TOKENS), list(map(len, TOKENS)), [])
    backend = make_backend(GrammarContext(vocabulary, END + 1, (END,)))
    text = backend.translate(GrammarSource(kind="regex", text=pattern, param="test"), JsonSpacing())
    output, ahead = Progress(backend.compile(text)(), jumps=True), []
    for _ in range(4):
        ByteCount.looked_at = 0
        next_masks(backend, [output], (END,))
        assert ByteCount.looked_at < MOST_FORCED * 500
        assert len(output.ahead) == MOST_FORCED
        ahead += output.ahead
        output.accept(output.ahead[:])
    expected = (
        pattern.replace("a{49000}", "a" * 49000).replace("é{9000}b", "é" * 9000).replace("(ab ){9000}", "ab " * 9)
    )
    assert expected.encode().startswith(b"".join(TOKENS[token] for token in ahead[:20]))


def test_a_step_makes_few_masks_ahead_whatever_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "AHEAD_SECONDS", 60.0)
    backend: Any = Forced()
    outputs = [Progress(backend, jumps=True) for _ in range(40)]
    next_masks(backend, outputs, (0,))
    assert backend.masks == 40 + budget.AHEAD_MASKS
    assert all(output.ahead for output in outputs)
    monkeypatch.setattr(budget, "AHEAD_SECONDS", -1.0)
    slow: Any = Forced()
    next_masks(slow, [Progress(slow, jumps=True) for _ in range(40)], (0,))
    assert slow.masks == 40


def test_a_request_whose_masks_take_too_long_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are of the processor: those of one mask, and of all masks beyond what is fair."""
    now = [0.0]
    costs: dict[int, float] = {}

    class Slow(Forced):
        def fill(self, matchers: Sequence[Any], masks: Masks) -> None:
            super().fill(matchers, masks)
            now[0] += sum([costs[id(matcher)] for matcher in matchers])

    clock = SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0])
    monkeypatch.setattr(budget, "time", clock)
    backend: Any = Slow()
    honest, slow, hostile = (Progress(Forced(), jumps=False) for _ in range(3))  # type: ignore[arg-type]
    costs.update({id(honest.matcher): 0.009, id(slow.matcher): 0.07, id(hostile.matcher): 0.5})
    next_masks(backend, [honest, slow, hostile], (0,))  # nobody knows whose mask it was
    assert [output.failure for output in (honest, slow, hostile)] == ["", "", ""]
    steps = 0
    while not slow.failure:
        next_masks(backend, [honest, slow] if steps else [honest, slow, hostile], (0,))
        steps += 1
    assert steps == 17  # 0.06 seconds each beyond the fair time
    assert "0.5 seconds" in hostile.failure
    assert "more than 0.01 per token" in slow.failure
    assert not honest.failure
    assert not honest.time.timed


def test_a_mask_that_takes_milliseconds_makes_the_next_ones_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an ambiguous grammar grow by the token. Whichever of several it was, made together."""
    now, cost = [0.0], [0.0]

    class Growing(Forced):
        def fill(self, matchers: Sequence[Any], masks: Masks) -> None:
            super().fill(matchers, masks)
            now[0] += cost[0] * len(matchers)

    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0]))
    backend: Any = Growing()
    for outputs, seconds, slow in ((1, 0.002, False), (1, 0.004, True), (5, 0.001, False), (5, 0.003, True)):
        progresses = [Progress(backend, jumps=False) for _ in range(outputs)]
        cost[0] = seconds
        next_masks(backend, progresses, (0,))
        assert progresses[-1].time.slow == slow, (outputs, seconds)
        cost[0] = 0.0
        for _ in range(budget.QUICK_MASKS):
            next_masks(backend, progresses[-1:], (0,))
        assert not progresses[-1].time.slow


ORDINARY = 0.0005  # seconds of a mask


@every(
    ("seconds", "rows", "grammars"),
    [
        (0.017, 24, 1),  # as one ambiguous grammar with n = 24
        (0.017, 24, 24),
        (0.017, 128, 1),
        (0.06, 8, 1),
        (0.09, 24, 3),
        (0.002, 128, 1),
    ],
)
@every("cheap_masks", [0, 5])
def test_the_masks_of_a_step_have_a_budget_whatever_the_number_of_outputs(
    seconds: float, rows: int, grammars: int, cheap_masks: int
) -> None:
    """Outputs of costly grammars come before and after two ordinary ones. Their first masks may cost as little."""
    now = [0.0]
    costs: dict[int, float] = {}

    class Costly(Forced):
        def fill(self, matchers: Sequence[Any], masks: Masks) -> None:
            super().fill(matchers, masks)
            now[0] += sum([costs[id(matcher)] for matcher in matchers])

    backend: Any = Costly()
    kinds = [object() for _ in range(grammars)]
    hostile = [
        Progress(Forced(), jumps=row % 2 == 0, grammar=kinds[row % grammars])  # type: ignore[arg-type]
        for row in range(rows)
    ]
    ordinary = [Progress(Forced(), jumps=True, grammar="ordinary") for _ in range(2)]  # type: ignore[arg-type]
    costs |= {id(output.matcher): ORDINARY for output in ordinary}
    clock = SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "time", clock)
        for step in range(300):
            costs |= {id(output.matcher): ORDINARY if step < cheap_masks else seconds for output in hostile}
            served = [output for output in (*hostile[:9], *ordinary, *hostile[9:]) if not output.failure]
            if served == ordinary:
                break
            began = now[0]
            next_masks(backend, served, (0,))
            # A grammar may show once, in one step, what it costs from there on.
            once = grammars + budget.TOGETHER if step == cheap_masks and grammars > 1 else 1
            assert now[0] - began <= budget.STEP_SECONDS + once * seconds + 2 * budget.AHEAD_SECONDS
            for output in served:
                output.accept(output.ahead[:] or [1])
    assert [output.failure for output in ordinary] == ["", ""]
    ended = [output.failure for output in hostile if output.failure]
    if seconds * rows > 0.2:
        assert any(f"for its {rows + 2} outputs with grammars" in message for message in ended)
    assert len(ended) < rows or seconds > budget.FAIR_SECONDS


def test_an_output_that_no_token_may_follow_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = Forced(dead_after=3)
    output = Progress(backend, jumps=True)
    monkeypatch.setattr(budget, "AHEAD_SECONDS", 60.0)
    masks = [next_masks(backend, [output], (0,))[0].tolist()]
    assert len(output.ahead) == 3
    output.accept([1, 1, 1])
    masks.append(next_masks(backend, [output], (0,))[0].tolist())
    assert masks == [[2], [1]]
    assert output.failure == "no token is allowed next"


def test_a_grammar_that_cannot_go_on_for_some_tokens_is_refused() -> None:
    vocabulary = Vocabulary(bytes(range(256)), [1] * 256, [])
    backend = make_backend(GrammarContext(vocabulary, 257, (256,)))

    def check(text: str) -> None:
        grammar = backend.translate(GrammarSource(kind="regex", text=text, param="test"), JsonSpacing())
        try_out(backend, backend.compile(grammar), (256,))

    for good in ("a", "a?", "[a-z]{70}", "(ab|cd)+"):
        check(good)
    for endless in ("a{2000000000,2147483647}", "(a?){500}a{500}"):
        with pytest.raises(GrammarError, match=r"it cannot go on after \d tokens: lexer error: too many"):
            check(endless)
    dead: Any = Forced(dead_after=5)
    with pytest.raises(GrammarError, match="it cannot go on after 5 tokens: no token"):
        try_out(dead, lambda: dead, (0,))
    endless_backend: Any = Forced()
    try_out(endless_backend, lambda: endless_backend, (0,))
    assert endless_backend.masks == TRIED_TOKENS
