"""The rules for the bucket bounds of histograms."""

from __future__ import annotations

from srv.server.observe.buckets import TOKENS, one_two_five, token_buckets


def test_rules() -> None:
    for rule, expected in (
        (None, TOKENS),
        (("default",), TOKENS),
        (("custom", "50", "10"), (10, 50)),
        (("customer", "1"), (1,)),
        (("tse", "1000", "2", "3"), (992, 996, 998, 1000, 1002, 1004, 1008)),
        (("tse", "4", "2", "3"), (0, 2, 4, 6, 8, 12)),  # none below 0
    ):
        assert token_buckets(rule) == tuple(map(float, expected)), rule


def test_one_two_five() -> None:
    assert one_two_five(70) == (1, 2, 5, 10, 20, 50)
    assert one_two_five(0) == (1,)
