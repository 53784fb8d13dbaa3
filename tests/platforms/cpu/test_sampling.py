"""The CPU platform's sampling backend: filters, drawn tokens, and that rows do not depend on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from every import every
from host_transfers import HOST_TRANSFERS
from hypothesis import given, settings
from hypothesis import strategies as st

from srv.platform.interface import BackendContext, SamplingBatch
from srv_cpu import sampling
from srv_cpu.sampling import CpuSampling
from srv_kernels.cpu.library import Loaded, load

CONTEXT = BackendContext(cast(Any, None), torch.device("cpu"), None, 16, HOST_TRANSFERS)


def without_native() -> CpuSampling:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "load", lambda: Loaded(None, "not here"))
        return CpuSampling(CONTEXT)


BACKENDS = {"torch": without_native()} | ({} if load().library is None else {"native": CpuSampling(CONTEXT)})
each_backend = pytest.mark.parametrize("backend_name", BACKENDS)


class Params(NamedTuple):
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0


def draw(
    backend_name: str, logits: torch.Tensor, params: Sequence[Params], uniform: Sequence[float] | np.ndarray
) -> list[int]:
    vocab = logits.shape[1]
    limits = [row_params.top_k for row_params in params if 0 < row_params.top_k < vocab]
    batch = SamplingBatch(
        logits=logits,
        temperature=torch.tensor([row_params.temperature for row_params in params]),
        top_k=torch.tensor(
            [row_params.top_k if row_params.top_k > 0 else vocab for row_params in params], dtype=torch.int32
        ),
        top_p=torch.tensor([row_params.top_p for row_params in params]),
        min_p=torch.tensor([row_params.min_p for row_params in params]),
        uniform=torch.tensor(uniform, dtype=torch.float64),
        all_greedy=all(row_params.temperature == 0 for row_params in params),
        any_top_k=bool(limits),
        any_top_p=any(row_params.top_p < 1 for row_params in params),
        any_min_p=any(row_params.min_p > 0 for row_params in params),
        largest_top_k=max(limits, default=0),
    )
    before = logits.clone()
    tokens = BACKENDS[backend_name].sample(batch)
    assert tokens.dtype == torch.int64
    assert torch.equal(logits, before) or not logits.isfinite().all()
    return cast("list[int]", tokens.tolist())


def expected(logits: torch.Tensor, row_params: Params) -> np.ndarray:
    """The distribution after the filters, in float64, computed from their definitions."""
    wide = logits.double().numpy()
    if row_params.temperature == 0:
        return np.eye(len(wide))[int(wide.argmax())]
    order = np.argsort(-wide, kind="stable")
    weights = np.exp((wide[order] - wide.max()) / row_params.temperature)
    if row_params.top_k > 0:
        weights[row_params.top_k :] = 0
    weights /= weights.sum()
    before = np.concatenate(([0.0], weights.cumsum()[:-1]))
    if row_params.top_p < 1:
        weights[before >= row_params.top_p] = 0
    weights[weights < row_params.min_p * weights[0]] = 0
    result = np.empty_like(weights)
    result[order] = weights / weights.sum()
    return result


def normal(rows: int, vocab: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


PARAMS = [
    Params(),
    Params(temperature=0.5),
    Params(temperature=3.0),
    Params(top_k=1),
    Params(top_k=5),
    Params(top_p=0.3),
    Params(top_p=0.9, temperature=0.7),
    Params(min_p=0.2),
    Params(top_k=10, top_p=0.8, min_p=0.05, temperature=1.5),
]


@each_backend
@every("row_params", PARAMS)
@every("vocab", [33, 64])
def test_draws_follow_the_filtered_distribution(backend_name: str, row_params: Params, vocab: int) -> None:
    """A chi-square test with fixed random numbers. 99.99 % of correct samplers stay below the bound."""
    count = 4000
    logits = normal(1, vocab, seed=vocab)
    uniform = np.random.default_rng(7).random(count)
    tokens = draw(backend_name, logits.expand(count, -1).contiguous(), [row_params] * count, uniform)
    probability = expected(logits[0], row_params)
    seen = np.bincount(tokens, minlength=vocab)
    assert (seen[probability == 0] == 0).all(), "a token outside the kept ones was drawn"
    wanted = probability[probability > 0] * count
    statistic = float((np.square(seen[probability > 0] - wanted) / wanted).sum())
    freedom = len(wanted) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert statistic <= bound


@st.composite
def random_batches(data: st.DrawFn) -> tuple[torch.Tensor, list[Params], list[float]]:
    vocab = data(st.sampled_from((7, 64, 500, 1024)))
    count = data(st.integers(2, 6))
    logits = normal(count, vocab, data(st.integers(0, 999)), data(st.sampled_from((0.01, 2.0, 30.0))))
    if data(st.booleans()):
        logits = (logits * 2).round() / 2  # many equal logits, as in bfloat16
    params = [
        Params(
            data(st.sampled_from((0.0, 0.3, 1.0, 5.0))),
            data(st.sampled_from((-1, 1, 3, 50, 400))),
            data(st.sampled_from((1e-6, 0.5, 0.95, 1.0, 1.0))),
            data(st.sampled_from((0.0, 0.0, 0.1, 1.0))),
        )
        for _ in range(count)
    ]
    uniform = data(st.lists(st.floats(0, 1, exclude_max=True), min_size=count, max_size=count))
    return logits, params, uniform


@each_backend
@settings(max_examples=150, deadline=None)
@given(random_batches())
def test_rows_do_not_depend_on_each_other(
    backend_name: str, drawn: tuple[torch.Tensor, list[Params], list[float]]
) -> None:
    logits, params, uniform = drawn
    together = draw(backend_name, logits, params, uniform)
    alone = [draw(backend_name, logits[row:][:1], params[row:][:1], uniform[row:][:1])[0] for row in range(len(params))]
    assert together == alone
    order = list(reversed(range(len(params))))
    reversed_rows = draw(backend_name, logits[order], [params[row] for row in order], [uniform[row] for row in order])
    assert reversed_rows == [together[row] for row in order]


@each_backend
@settings(max_examples=150, deadline=None)
@given(random_batches())
def test_drawn_token_is_kept_by_the_filters(
    backend_name: str, drawn: tuple[torch.Tensor, list[Params], list[float]]
) -> None:
    logits, params, uniform = drawn
    for row, token in enumerate(draw(backend_name, logits, params, uniform)):
        # Slightly wider filters, because float32 decides at the boundary.
        row_params = params[row]
        wider = row_params._replace(top_p=min(1.0, row_params.top_p * (1 + 1e-5)), min_p=row_params.min_p * (1 - 1e-5))
        assert expected(logits[row], wider)[token] > 0


FILTERS = [
    Params(),
    Params(temperature=0.2),
    Params(temperature=1e4, top_k=50),  # all weights are nearly equal
    Params(top_k=50),
    Params(temperature=0.01, top_k=50),  # most of those 50 weights are nearly 0
    Params(top_p=0.95),
    Params(top_p=0.9999, temperature=2.0),
    Params(min_p=0.05),
    Params(min_p=0.1, temperature=2.0),
    Params(min_p=1e-6, temperature=0.7),
    Params(top_k=200, top_p=0.9, min_p=0.01, temperature=1.3),
]


@each_backend
@every("row_params", FILTERS)
@every(("vocab", "scale"), [(5, 1.0), (255, 3.0), (4099, 3.0), (49152, 0.3), (49152, 8.0)])
def test_random_number_determines_the_token(backend_name: str, row_params: Params, vocab: int, scale: float) -> None:
    """The kept tokens divide [0, 1) by their probabilities: in vocabulary order, or with a filter in that of logits."""
    logits = normal(1, vocab, seed=vocab, scale=scale)
    probability = expected(logits[0], row_params)
    filtered = 0 < row_params.top_k < vocab or row_params.top_p < 1 or row_params.min_p > 0
    order = np.argsort(-logits[0].double().numpy(), kind="stable") if filtered else np.arange(vocab)
    ends = probability[order].cumsum()
    place = np.empty(vocab, dtype=np.int64)
    place[order] = np.arange(vocab)
    noise = np.random.default_rng(vocab).random(64)
    for token, at in zip(draw(backend_name, logits.expand(64, -1), [row_params] * 64, noise), noise, strict=True):
        end = ends[place[token]]
        assert probability[token] > 0
        assert end - probability[token] - 1e-5 <= at <= end + 1e-5


@settings(max_examples=60, deadline=None)
@given(random_batches())
def test_candidates_and_full_sort_draw_the_same(drawn: tuple[torch.Tensor, list[Params], list[float]]) -> None:
    logits, params, uniform = drawn
    few = draw("torch", logits, params, uniform)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_TOP_P_CANDIDATES", 1 << 20)
        assert draw("torch", logits, params, uniform) == few


@each_backend
def test_nucleus_larger_than_the_candidates_is_sorted_completely(backend_name: str) -> None:
    logits = normal(1, 4096, seed=3, scale=0.1)
    tokens = draw(
        backend_name, logits.expand(200, -1).contiguous(), [Params(top_p=0.99)] * 200, np.linspace(0, 0.999, 200)
    )
    ranks = (logits[0][None] > logits[0][tokens][:, None]).sum(-1)
    assert ranks.max() > 3500
    assert (ranks.diff() >= 0).all(), "kept tokens are not in the order of descending probability"


def test_rows_with_nuclei_of_different_sizes_draw_as_if_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose nuclei have a few, hundreds, thousands and most of 32,768 tokens, with many equal logits."""
    logits = torch.cat([normal(2, 32768, seed=4, scale=scale) for scale in (6.0, 3.5, 3.0, 0.2)])
    logits = (logits * 16).round() / 16
    params, noise = [Params(top_p=0.9)] * 8, [0.5, 0.999] * 4
    with_candidates = draw("torch", logits, params, noise)
    monkeypatch.setattr(sampling, "_TOP_P_CANDIDATES", 32768)
    assert with_candidates == draw("torch", logits, params, noise)


@each_backend
@every("row_params", [Params(top_p=1e-9), Params(top_k=1), Params(min_p=1.0), Params(temperature=1e-9), Params(0.0)])
@every("noise", [0.0, 0.5, 1 - 2.0**-53])
@every("vocab", [100, 1024])
def test_extreme_parameters_are_greedy(backend_name: str, row_params: Params, noise: float, vocab: int) -> None:
    logits = normal(4, vocab, seed=1)
    assert draw(backend_name, logits, [row_params] * 4, [noise] * 4) == logits.argmax(-1).tolist()


@each_backend
@every("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_most_likely_returns_the_tokens_of_greedy_rows(backend_name: str, dtype: torch.dtype) -> None:
    backend = BACKENDS[backend_name]
    logits = normal(9, 1000, seed=4).to(dtype)
    tokens, finite = backend.most_likely(logits)
    assert tokens.tolist() == draw(backend_name, logits.float(), [Params(0.0)] * 9, [0.0] * 9)
    assert finite.all()
    logits[2, 30], logits[4, 999], logits[6] = torch.nan, torch.inf, -torch.inf
    again, finite = backend.most_likely(logits)
    assert finite.tolist() == [row not in (2, 4, 6) for row in range(9)]
    assert again.tolist() == [
        token if is_finite else 0 for token, is_finite in zip(tokens.tolist(), finite.tolist(), strict=True)
    ]


@each_backend
def test_huge_temperature_is_uniform(backend_name: str) -> None:
    logits = normal(1, 64, seed=2).expand(64, -1).contiguous()
    assert draw(backend_name, logits, [Params(temperature=1e30)] * 64, (np.arange(64) + 0.5) / 64) == list(range(64))


@each_backend
@every("row_params", [Params(), Params(top_k=40), Params(top_p=0.999999), Params(min_p=1e-9)])
@every("noise", [0.0, 0.3, 1 - 2.0**-53])
@every("vocab", [50, 512])
def test_masked_tokens_are_never_drawn(backend_name: str, row_params: Params, noise: float, vocab: int) -> None:
    """All tokens except three are at -inf, and the random number is at both ends of its range."""
    logits = torch.full((1, vocab), -torch.inf)
    logits[0, [5, 17, 40]] = torch.tensor([1.0, 1.0, 0.5])
    assert draw(backend_name, logits, [row_params], [noise])[0] in (5, 17, 40)


@each_backend
def test_of_equal_logits_the_lowest_token_id_wins(backend_name: str) -> None:
    logits = torch.zeros(1, 512)
    logits[0, 300:] = 1.0
    assert draw(backend_name, logits, [Params(0.0)], [0.9]) == [300]
    assert draw(backend_name, logits, [Params(top_k=2)], [0.4]) == [300]
    assert draw(backend_name, logits, [Params(top_k=2)], [0.6]) == [301]


@each_backend
def test_top_p_counts_within_top_k(backend_name: str) -> None:
    """top-p applies after top-k: of (0.4, 0.3 | 0.2, 0.1) two remain, and the first has 0.57 of their weight."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert draw(backend_name, logits, [Params(top_k=2, top_p=0.55)], [0.99]) == [0]
    assert draw(backend_name, logits, [Params(top_p=0.55)], [0.99]) == [1]


@each_backend
@every("row_params", PARAMS)
def test_a_row_without_finite_logits_affects_no_other(backend_name: str, row_params: Params) -> None:
    logits = normal(3, 1024, seed=9)
    want = draw(backend_name, logits, [row_params] * 3, [0.4] * 3)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = logits.clone()
        broken[1] = bad
        got = draw(backend_name, broken, [row_params] * 3, [0.4] * 3)
        assert (got[0], got[2]) == (want[0], want[2])
        assert 0 <= got[1] < 1024
