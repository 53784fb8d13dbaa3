"""Patterns of decimal numbers and of multiples: the numbers that they match are those in the range."""

from __future__ import annotations

import random
import re
from decimal import Decimal

from every import every

from srv.grammar.decimal_ranges import at_least, at_most
from srv.grammar.integer_ranges import multiples_pattern


def numbers() -> list[str]:
    choice = random.Random(0)
    texts = ["0", "0.0", "10", "9.99", "100.1", "-12.340", "1.05"]
    for _ in range(1500):
        whole = choice.randrange(choice.choice([3, 20, 200]))
        digits = f".{choice.randrange(choice.choice([10, 100, 1000]))}" if choice.random() < 0.7 else ""
        texts.append(f"{choice.choice(['', '-'])}{whole}{digits}")
    return [text for text in texts if Decimal(text) or text[0] != "-"]


NUMBERS = numbers()


@every("bound", ["0", "-0.5", "0.5", "1.05", "12", "-3", "-12.34", "9.99", "0.001", "1E2", "100.10"])
def test_decimals_on_one_side_of_a_bound(bound: str) -> None:
    edge = Decimal(bound)
    sides = [
        (at_least(edge), lambda value: value >= edge),
        (at_least(edge, above=True), lambda value: value > edge),
        (at_most(edge), lambda value: value <= edge),
        (at_most(edge, below=True), lambda value: value < edge),
    ]
    for pattern, holds in sides:
        matches = re.compile(pattern).fullmatch
        assert [text for text in NUMBERS if bool(matches(text)) != holds(Decimal(text))] == []


@every("divisor", [1, 2, 4, 5, 8, 10, 20, 25, 40, 100, 125, 1000])
def test_multiples(divisor: int) -> None:
    pattern = multiples_pattern(divisor, None, None)
    assert pattern is not None
    matches = re.compile(pattern).fullmatch
    assert [value for value in range(-3000, 3000) if bool(matches(str(value))) != (value % divisor == 0)] == []


def test_few_multiples_are_listed_and_others_need_a_pattern() -> None:
    assert multiples_pattern(7, -20, 20) == "(-14|-7|0|7|14)"
    assert multiples_pattern(7, None, 20) is None
    assert multiples_pattern(7, 0, 10**9) is None
