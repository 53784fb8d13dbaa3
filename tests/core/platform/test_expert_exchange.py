"""Rows that go to the ranks of their experts and back, between real processes, compared with the op on all experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from communicating_ranks import RankProcesses
from every import every
from exchanging_ranks import LIMIT, exchange, expected, replay, tokens_of, too_many

from srv.platform.expert_exchange import ExchangeSizes, through_experts
from srv_kernels.cpu.library import load

COUNT, TOP_K = 6, 3  # experts in all, and of a token


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with RankProcesses(request.param) as processes:
        yield processes


@every(
    ("form", "kind", "tokens", "dtype"),
    [
        (form, kind, tokens, dtype)
        for form in ("exact", "fixed")
        for kind, tokens, dtype in (
            ("random", (5, 3, 4), torch.float32),
            ("random", (6, 6, 6), torch.bfloat16),
            ("one", (6, 1, 2), torch.float32),  # all tokens to the last rank
            ("few", (4, 6, 5), torch.float32),  # many without an expert
            ("random", (0, 5, 0), torch.float32),
            ("random", (0, 0, 0), torch.float32),
            ("random", (13, 0, 7), torch.float32),  # in several rounds
        )
    ],
)
def test_results_are_those_of_all_experts(
    ranks: RankProcesses, form: str, kind: str, tokens: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    size = len(ranks)
    counts = list(tokens[:size])
    folder = tmp_path / f"{form}-{kind}-{'-'.join(map(str, counts))}"
    folder.mkdir()
    found = ranks.run(exchange, folder, 30.0, form, COUNT, TOP_K, kind, counts, dtype)
    computed = 0
    for rank, one in enumerate(found):
        assert one is not None
        result, named, none = one
        own = tokens_of(rank, counts[rank], COUNT, TOP_K, kind, dtype)
        assert (result.shape, result.dtype) == (own[0].shape, dtype)
        error = (result.double() - expected(own, COUNT)).abs().max() if counts[rank] else 0.0
        assert error < (1e-5 if dtype is torch.float32 else 0.03)
        assert len(named) == max(1, -(-max(counts) // LIMIT))
        assert form == "fixed" or not any(none)
        computed += sum(named)
    wanted = sum(int((tokens_of(rank, n, COUNT, TOP_K, kind, dtype)[1] >= 0).sum()) for rank, n in enumerate(counts))
    assert computed == wanted, "each pair of a token and an expert is computed once"


def test_more_tokens_than_the_limit_are_refused(ranks: RankProcesses, tmp_path: Path) -> None:
    for form in ("exact", "fixed"):
        folder = tmp_path / form
        folder.mkdir()
        for text in ranks.run(too_many, folder, 30.0, form):
            assert text is not None
            assert text.startswith("a rank dispatches at most 6 tokens to experts in one call, and has 7")


@pytest.mark.skipif(load().library is None, reason="captures need the native library: python -m srv_kernels.cpu.build")
def test_a_captured_exchange_is_repeated_with_other_tokens(ranks: RankProcesses, tmp_path: Path) -> None:
    for errors in ranks.run(replay, tmp_path, 30.0):
        assert errors is not None
        assert max(errors) < 1e-5


def test_what_ranks_have_not_agreed_on_is_refused() -> None:
    with pytest.raises(ValueError, match="6 experts cannot be divided among 4 ranks"):
        ExchangeSizes(6, 2, 8, 1).local(4)

    class Limited:
        max_tokens, captured = 4, False

    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="dispatches 3 tokens, and the ranks have agreed on at most 2"):
        through_experts(Limited(), x, x.long(), x, lambda rows, ids, weights: rows, 2)  # type: ignore[arg-type]
