"""The CPU platform's sampling backend: what is kept, what is drawn, and that neighbours change nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st

from srv.platform.interface import BackendContext, SamplingBatch
from srv_cpu import sampling
from srv_cpu.sampling import CpuSampling
from srv_kernels.cpu.library import Loaded, load

CONTEXT = BackendContext(cast(Any, None), torch.device("cpu"), None, 16)


def without_native() -> CpuSampling:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "load", lambda: Loaded(None, "not here"))
        return CpuSampling(CONTEXT)


WAYS = {"torch": without_native()} | ({} if load().library is None else {"native": CpuSampling(CONTEXT)})
each_way = pytest.mark.parametrize("way", WAYS)


class Ask(NamedTuple):
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0


def draw(way: str, logits: torch.Tensor, asks: Sequence[Ask], uniform: Sequence[float] | np.ndarray) -> list[int]:
    vocab = logits.shape[1]
    limits = [ask.top_k for ask in asks if 0 < ask.top_k < vocab]
    batch = SamplingBatch(
        logits=logits,
        temperature=torch.tensor([ask.temperature for ask in asks]),
        top_k=torch.tensor([ask.top_k if ask.top_k > 0 else vocab for ask in asks], dtype=torch.int32),
        top_p=torch.tensor([ask.top_p for ask in asks]),
        min_p=torch.tensor([ask.min_p for ask in asks]),
        uniform=torch.tensor(uniform, dtype=torch.float64),
        all_greedy=all(ask.temperature == 0 for ask in asks),
        any_top_k=bool(limits),
        any_top_p=any(ask.top_p < 1 for ask in asks),
        any_min_p=any(ask.min_p > 0 for ask in asks),
        largest_top_k=max(limits, default=0),
    )
    before = logits.clone()
    tokens = WAYS[way].sample(batch)
    assert tokens.dtype == torch.int64
    assert torch.equal(logits, before) or not logits.isfinite().all()
    return cast("list[int]", tokens.tolist())


def expected(logits: torch.Tensor, ask: Ask) -> np.ndarray:
    """The distribution that the filters leave, in float64, straight from their definitions."""
    wide = logits.double().numpy()
    if ask.temperature == 0:
        return np.eye(len(wide))[int(wide.argmax())]
    order = np.argsort(-wide, kind="stable")
    weights = np.exp((wide[order] - wide.max()) / ask.temperature)
    if ask.top_k > 0:
        weights[ask.top_k :] = 0
    weights /= weights.sum()
    before = np.concatenate(([0.0], weights.cumsum()[:-1]))
    if ask.top_p < 1:
        weights[before >= ask.top_p] = 0
    weights[weights < ask.min_p * weights[0]] = 0
    result = np.empty_like(weights)
    result[order] = weights / weights.sum()
    return result


def normal(rows: int, vocab: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


ASKS = [
    Ask(),
    Ask(temperature=0.5),
    Ask(temperature=3.0),
    Ask(top_k=1),
    Ask(top_k=5),
    Ask(top_p=0.3),
    Ask(top_p=0.9, temperature=0.7),
    Ask(min_p=0.2),
    Ask(top_k=10, top_p=0.8, min_p=0.05, temperature=1.5),
]


@each_way
@every("ask", ASKS)
@every("vocab", [33, 64])
def test_draws_follow_the_filtered_distribution(way: str, ask: Ask, vocab: int) -> None:
    """Chi-square with fixed noise. 99.99 % of right samplers stay below the bound."""
    count = 4000
    logits = normal(1, vocab, seed=vocab)
    uniform = np.random.default_rng(7).random(count)
    tokens = draw(way, logits.expand(count, -1).contiguous(), [ask] * count, uniform)
    share = expected(logits[0], ask)
    seen = np.bincount(tokens, minlength=vocab)
    assert (seen[share == 0] == 0).all(), "a token outside the kept ones was drawn"
    wanted = share[share > 0] * count
    statistic = float((np.square(seen[share > 0] - wanted) / wanted).sum())
    freedom = len(wanted) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert statistic <= bound


@st.composite
def rows_of_asks(data: st.DrawFn) -> tuple[torch.Tensor, list[Ask], list[float]]:
    vocab = data(st.sampled_from((7, 64, 500, 1024)))
    count = data(st.integers(2, 6))
    logits = normal(count, vocab, data(st.integers(0, 999)), data(st.sampled_from((0.01, 2.0, 30.0))))
    if data(st.booleans()):
        logits = (logits * 2).round() / 2  # many equals, as bfloat16 gives them
    asks = [
        Ask(
            data(st.sampled_from((0.0, 0.3, 1.0, 5.0))),
            data(st.sampled_from((-1, 1, 3, 50, 400))),
            data(st.sampled_from((1e-6, 0.5, 0.95, 1.0, 1.0))),
            data(st.sampled_from((0.0, 0.0, 0.1, 1.0))),
        )
        for _ in range(count)
    ]
    uniform = data(st.lists(st.floats(0, 1, exclude_max=True), min_size=count, max_size=count))
    return logits, asks, uniform


@each_way
@settings(max_examples=150, deadline=None)
@given(rows_of_asks())
def test_neighbours_do_not_change_a_row(way: str, drawn: tuple[torch.Tensor, list[Ask], list[float]]) -> None:
    logits, asks, uniform = drawn
    together = draw(way, logits, asks, uniform)
    alone = [draw(way, logits[row:][:1], asks[row:][:1], uniform[row:][:1])[0] for row in range(len(asks))]
    assert together == alone
    order = list(reversed(range(len(asks))))
    turned = draw(way, logits[order], [asks[row] for row in order], [uniform[row] for row in order])
    assert turned == [together[row] for row in order]


@each_way
@settings(max_examples=150, deadline=None)
@given(rows_of_asks())
def test_drawn_token_is_kept_by_the_filters(way: str, drawn: tuple[torch.Tensor, list[Ask], list[float]]) -> None:
    logits, asks, uniform = drawn
    for row, token in enumerate(draw(way, logits, asks, uniform)):
        # A hair wider than asked: float32 decides at the border.
        ask = asks[row]
        wider = ask._replace(top_p=min(1.0, ask.top_p * (1 + 1e-5)), min_p=ask.min_p * (1 - 1e-5))
        assert expected(logits[row], wider)[token] > 0


PLACED = [
    Ask(),
    Ask(temperature=0.2),
    Ask(temperature=1e4, top_k=50),  # all weights are nearly equal
    Ask(top_k=50),
    Ask(temperature=0.01, top_k=50),  # most of those 50 weigh next to nothing
    Ask(top_p=0.95),
    Ask(top_p=0.9999, temperature=2.0),
    Ask(min_p=0.05),
    Ask(min_p=0.1, temperature=2.0),
    Ask(min_p=1e-6, temperature=0.7),
    Ask(top_k=200, top_p=0.9, min_p=0.01, temperature=1.3),
]


@each_way
@every("ask", PLACED)
@every(("vocab", "scale"), [(5, 1.0), (255, 3.0), (4099, 3.0), (49152, 0.3), (49152, 8.0)])
def test_the_noise_points_at_the_token(way: str, ask: Ask, vocab: int, scale: float) -> None:
    """Kept tokens lie side by side, each as wide as it is probable: in vocabulary order, or with a filter by logit."""
    logits = normal(1, vocab, seed=vocab, scale=scale)
    share = expected(logits[0], ask)
    filtered = 0 < ask.top_k < vocab or ask.top_p < 1 or ask.min_p > 0
    order = np.argsort(-logits[0].double().numpy(), kind="stable") if filtered else np.arange(vocab)
    ends = share[order].cumsum()
    place = np.empty(vocab, dtype=np.int64)
    place[order] = np.arange(vocab)
    noise = np.random.default_rng(vocab).random(64)
    for token, at in zip(draw(way, logits.expand(64, -1), [ask] * 64, noise), noise, strict=True):
        end = ends[place[token]]
        assert share[token] > 0
        assert end - share[token] - 1e-5 <= at <= end + 1e-5


@settings(max_examples=60, deadline=None)
@given(rows_of_asks())
def test_candidates_and_full_sort_draw_the_same(drawn: tuple[torch.Tensor, list[Ask], list[float]]) -> None:
    logits, asks, uniform = drawn
    few = draw("torch", logits, asks, uniform)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_TOP_P_CANDIDATES", 1 << 20)
        assert draw("torch", logits, asks, uniform) == few


@each_way
def test_nucleus_wider_than_the_candidates_is_sorted_whole(way: str) -> None:
    logits = normal(1, 4096, seed=3, scale=0.1)
    tokens = draw(way, logits.expand(200, -1).contiguous(), [Ask(top_p=0.99)] * 200, np.linspace(0, 0.999, 200))
    ranks = (logits[0][None] > logits[0][tokens][:, None]).sum(-1)
    assert ranks.max() > 3500
    assert (ranks.diff() >= 0).all(), "kept tokens are drawn in order of falling probability"


def test_rows_settled_at_different_widths_draw_as_if_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nuclei of a few, of hundreds, of thousands and of most of 32,768 tokens, side by side, with many equals."""
    logits = torch.cat([normal(2, 32768, seed=4, scale=scale) for scale in (6.0, 3.5, 3.0, 0.2)])
    logits = (logits * 16).round() / 16
    asks, noise = [Ask(top_p=0.9)] * 8, [0.5, 0.999] * 4
    stepwise = draw("torch", logits, asks, noise)
    monkeypatch.setattr(sampling, "_TOP_P_CANDIDATES", 32768)
    assert stepwise == draw("torch", logits, asks, noise)


@each_way
@every("ask", [Ask(top_p=1e-9), Ask(top_k=1), Ask(min_p=1.0), Ask(temperature=1e-9), Ask(0.0)])
@every("noise", [0.0, 0.5, 1 - 2.0**-53])
@every("vocab", [100, 1024])
def test_ends_of_the_scale_are_greedy(way: str, ask: Ask, noise: float, vocab: int) -> None:
    logits = normal(4, vocab, seed=1)
    assert draw(way, logits, [ask] * 4, [noise] * 4) == logits.argmax(-1).tolist()


@each_way
@every("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_short_way_of_greedy_rows_gives_the_same_tokens(way: str, dtype: torch.dtype) -> None:
    backend = WAYS[way]
    logits = normal(9, 1000, seed=4).to(dtype)
    tokens, finite = backend.most_likely(logits)
    assert tokens.tolist() == draw(way, logits.float(), [Ask(0.0)] * 9, [0.0] * 9)
    assert finite.all()
    logits[2, 30], logits[4, 999], logits[6] = torch.nan, torch.inf, -torch.inf
    again, finite = backend.most_likely(logits)
    assert finite.tolist() == [row not in (2, 4, 6) for row in range(9)]
    assert again.tolist() == [
        token if well else 0 for token, well in zip(tokens.tolist(), finite.tolist(), strict=True)
    ]


@each_way
def test_huge_temperature_is_uniform(way: str) -> None:
    logits = normal(1, 64, seed=2).expand(64, -1).contiguous()
    assert draw(way, logits, [Ask(temperature=1e30)] * 64, (np.arange(64) + 0.5) / 64) == list(range(64))


@each_way
@every("ask", [Ask(), Ask(top_k=40), Ask(top_p=0.999999), Ask(min_p=1e-9)])
@every("noise", [0.0, 0.3, 1 - 2.0**-53])
@every("vocab", [50, 512])
def test_masked_tokens_are_never_drawn(way: str, ask: Ask, noise: float, vocab: int) -> None:
    """With everything but three tokens at -inf, and the noise at both ends of its range."""
    logits = torch.full((1, vocab), -torch.inf)
    logits[0, [5, 17, 40]] = torch.tensor([1.0, 1.0, 0.5])
    assert draw(way, logits, [ask], [noise])[0] in (5, 17, 40)


@each_way
def test_equals_are_taken_by_token_id(way: str) -> None:
    logits = torch.zeros(1, 512)
    logits[0, 300:] = 1.0
    assert draw(way, logits, [Ask(0.0)], [0.9]) == [300]
    assert draw(way, logits, [Ask(top_k=2)], [0.4]) == [300]
    assert draw(way, logits, [Ask(top_k=2)], [0.6]) == [301]


@each_way
def test_top_p_counts_within_top_k(way: str) -> None:
    """top-p is of what top-k left: of (0.4, 0.3 | 0.2, 0.1) two remain, and the first holds 0.57 of them."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert draw(way, logits, [Ask(top_k=2, top_p=0.55)], [0.99]) == [0]
    assert draw(way, logits, [Ask(top_p=0.55)], [0.99]) == [1]


@each_way
@every("ask", ASKS)
def test_a_row_without_finite_logits_harms_no_other(way: str, ask: Ask) -> None:
    logits = normal(3, 1024, seed=9)
    want = draw(way, logits, [ask] * 3, [0.4] * 3)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = logits.clone()
        broken[1] = bad
        got = draw(way, broken, [ask] * 3, [0.4] * 3)
        assert (got[0], got[2]) == (want[0], want[2])
        assert 0 <= got[1] < 1024
