"""Shares of ranks: everything is held once, or evenly copied where there are fewer units than ranks."""

from __future__ import annotations

import pytest
from every import every

from srv.dist.group import RankGroup


def shares(total: int, ranks: int, unit: int = 1) -> list[tuple[int, int]]:
    return [RankGroup(rank=rank, size=ranks).share(total, unit) for rank in range(ranks)]


@every(
    ("total", "ranks", "unit", "expected"),
    [
        (6, 1, 1, [(0, 6)]),
        (6, 3, 1, [(0, 2), (2, 4), (4, 6)]),
        (24, 3, 8, [(0, 8), (8, 16), (16, 24)]),
        (16, 4, 8, [(0, 8), (0, 8), (8, 16), (8, 16)]),  # two KV heads on four ranks
        (8, 3, 8, [(0, 8), (0, 8), (0, 8)]),
    ],
)
def test_shares(total: int, ranks: int, unit: int, expected: list[tuple[int, int]]) -> None:
    assert shares(total, ranks, unit) == expected


@every(("total", "ranks", "unit"), [(7, 2, 1), (24, 2, 8), (20, 2, 8)])
def test_what_cannot_be_divided_is_an_error(total: int, ranks: int, unit: int) -> None:
    with pytest.raises(ValueError, match="cannot be divided among 2 ranks"):
        RankGroup(rank=0, size=ranks).share(total, unit)
