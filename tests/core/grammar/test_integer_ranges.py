"""Patterns of integers match exactly those of their range."""

from __future__ import annotations

import random
import re

from srv.grammar.integer_ranges import integer_pattern


def matches(low: int | None, high: int | None, value: int) -> bool:
    return re.fullmatch(integer_pattern(low, high), str(value)) is not None


def test_every_small_range() -> None:
    for low in range(-12, 13):
        for high in range(low, 13):
            values = [value for value in range(-130, 130) if matches(low, high, value)]
            assert values == list(range(low, high + 1)), (low, high)
        assert [value for value in range(-130, 130) if matches(low, None, value)] == list(range(low, 130))
        assert [value for value in range(-130, 130) if matches(None, low, value)] == list(range(-130, low + 1))


def test_large_ranges_at_their_ends() -> None:
    choice = random.Random(0)
    for _ in range(60):
        low, high = sorted(choice.randint(-(10 ** choice.randint(1, 40)), 10 ** choice.randint(1, 40)) for _ in "ab")
        near = {end + step for end in (low, high) for step in (-1000, -10, -1, 0, 1, 10, 1000)}
        for value in near | {(low + high) // 2, choice.randint(low, high)}:
            assert matches(low, high, value) == (low <= value <= high), (low, high, value)
            assert matches(low, None, value) == (low <= value)
            assert matches(None, high, value) == (value <= high)
        assert not re.fullmatch(integer_pattern(low, high), f"0{high}")
