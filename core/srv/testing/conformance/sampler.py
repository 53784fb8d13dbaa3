"""L1: sampling backends, compared with the distribution that the contract defines, computed here in float64.

A backend may order the kept tokens as it likes, so the exact check tests what holds for every order: as the noise rises
from 0 to 1, each kept token is drawn for one interval, whose length is the token's probability.

    noise   0 ────────────────┬───────┬──────────────────────┬──┬──── 1
    token          17         │   3   │          40          │ 5│ 22
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from srv.platform.interface import GreedySampling, SamplingBackend, SamplingBatch
from srv.sample.noise import uniform
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import is_native, sampling_backends

Floats = npt.NDArray[np.float64]

ROWS = 256  # rows per call
NOISE_VALUES = 2048  # of the exact check
FEW_NOISE_VALUES = 24  # of the same check of large rows
DRAWS = 8192  # of the statistical check
SMALL, MEDIUM, LARGE = 50, 1000, 70001  # vocabulary sizes; the large one is odd, and has ids of more than 16 bits
HUGE = 262147  # as Gemma 3, and a few more; Qwen 3 and Llama 3 have fewer
_FIRST_OF_HUGE, _CANDIDATES = 200_000, 4096  # the first token that is not masked; the candidates of no sampler
_LIKELY = (5, 32768, 40000, 65536, LARGE - 1)  # tokens of large rows
MIN_EXPECTED = 8.0  # tokens with fewer expected draws are counted together
_TIED = ((3, 40), (0, LARGE - 1), (17, 18), (1000, 9001, 20002), (5, 12345, LARGE - 2))  # tokens with equal logits
SIGNIFICANCE = 1e-9  # below it the statistical check fails; the noise is the same in every run
LARGEST_NOISE = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row to sample: logits, float32 [vocab], and sampling parameters."""

    logits: npt.NDArray[np.float32]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def probabilities(self) -> Floats:
        """float64 [vocab]: after temperature, top-k, top-p and min-p, in this order."""
        scaled = self.logits.astype(np.float64) / (self.temperature or 1.0)
        weights = np.exp(scaled - scaled.max())
        order = np.argsort(-weights, kind="stable")
        in_support = np.ones(len(weights), dtype=bool)
        if self.top_k:
            in_support[order[self.top_k :]] = False
        if self.top_p < 1.0:
            shares = np.where(in_support, weights, 0.0)[order] / weights[in_support].sum()
            in_support[order[np.cumsum(shares) - shares >= self.top_p]] = False
        if self.min_p:
            in_support &= weights >= self.min_p * weights.max()
        weights = np.where(in_support, weights, 0.0)
        probabilities: Floats = weights / weights.sum()
        return probabilities


def draw(kit: Kit, backend: SamplingBackend, rows: Sequence[SampledRow], noise: Floats) -> npt.NDArray[np.int64]:
    """Sample one token per row, as the engine does. Fault unless the result is int64 [rows] on the device."""
    batch = make_batch(kit, rows, noise)
    tokens: object = backend.sample(batch)
    if not isinstance(tokens, torch.Tensor) or tokens.dtype != torch.int64 or tuple(tokens.shape) != (len(rows),):
        shown = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise Fault(f"sample returned {shown} for {len(rows)} rows, not int64 [{len(rows)}]")
    if not same_device(tokens.device, kit.device):
        raise Fault(f"sample returned tokens on {tokens.device}, but the platform's device is {kit.device}")
    drawn: npt.NDArray[np.int64] = tokens.to("cpu").numpy()
    vocabulary = len(rows[0].logits)
    if drawn.min() < 0 or drawn.max() >= vocabulary:
        raise Fault(f"sample returned tokens from {drawn.min()} to {drawn.max()}; the vocabulary has {vocabulary}")
    return drawn


def make_batch(kit: Kit, rows: Sequence[SampledRow], noise: Floats) -> SamplingBatch:
    vocabulary = len(rows[0].logits)
    drawn = [row for row in rows if row.temperature > 0]
    limits = [row.top_k for row in drawn if row.top_k]

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(kit.device)

    return SamplingBatch(
        logits=torch.from_numpy(np.stack([row.logits for row in rows])).to(kit.device),
        temperature=column([row.temperature for row in rows], torch.float32),
        top_k=column([row.top_k or vocabulary for row in rows], torch.int32),
        top_p=column([row.top_p for row in rows], torch.float32),
        min_p=column([row.min_p for row in rows], torch.float32),
        uniform=torch.from_numpy(np.ascontiguousarray(noise, dtype=np.float64)).to(kit.device),
        all_greedy=not drawn,
        any_top_k=bool(limits),
        any_top_p=any(row.top_p < 1.0 for row in drawn),
        any_min_p=any(row.min_p > 0.0 for row in drawn),
        largest_top_k=max(limits, default=0),
    )


def logits(vocabulary: int, seed: int = 0, spread: float = 1.5) -> npt.NDArray[np.float32]:
    """Random logits; likely ones are not close to each other."""
    values = np.random.default_rng(seed).normal(0.0, spread, vocabulary)
    order = np.argsort(values)
    values[order] += np.arange(vocabulary) * 1e-5
    return values.astype(np.float32)


def _large_logits(seed: int) -> npt.NDArray[np.float32]:
    """Random logits of a large vocabulary, with a few tokens that together have most of the probability."""
    values = logits(LARGE, seed, spread=0.5)
    values[list(_LIKELY)] = 12.0 + 0.3 * np.arange(len(_LIKELY))
    return values


def placement(kit: Kit) -> str:
    """sample returns int64 [rows] on the platform's device, within the vocabulary."""
    rows = [SampledRow(logits(SMALL, seed)) for seed in range(7)]
    for _, backend in sampling_backends(kit):
        draw(kit, backend, rows, np.linspace(0.05, 0.95, len(rows)))
        draw(kit, backend, [dataclasses.replace(row, temperature=0.0) for row in rows], np.zeros(len(rows)))
        _check_kept(kit, backend, rows)
    return "int64, one per row, on the device"


def _check_kept(kit: Kit, backend: SamplingBackend, rows: Sequence[SampledRow]) -> None:
    """A later call does not overwrite the result, which is copied to the host while the next step runs."""
    greedy = [dataclasses.replace(row, temperature=0.0) for row in rows]
    others = [SampledRow(-row.logits, temperature=0.0) for row in greedy]
    first = backend.sample(make_batch(kit, greedy, np.zeros(len(rows))))
    before = first.to("cpu", copy=True)
    backend.sample(make_batch(kit, others, np.zeros(len(rows))))
    if not torch.equal(first.to("cpu"), before):
        raise Fault("a later call of sample has overwritten the result of an earlier one")


def greedy(kit: Kit) -> str:
    """Temperature 0 takes the largest logit, with and without sampled rows in the batch."""
    rows = [SampledRow(logits(SMALL, seed), temperature=0.0) for seed in range(9)]
    best = np.array([row.logits.argmax() for row in rows])
    mixed = [row if index % 2 else dataclasses.replace(row, temperature=0.7) for index, row in enumerate(rows)]
    for name, backend in sampling_backends(kit):
        if not np.array_equal(draw(kit, backend, rows, np.zeros(len(rows))), best):
            raise Fault(f"{name}: rows of temperature 0 do not get the token of the largest logit")
        tokens = draw(kit, backend, mixed, np.full(len(rows), LARGEST_NOISE))
        if not np.array_equal(tokens[1::2], best[1::2]):
            raise Fault(f"{name}: rows of temperature 0 get other tokens in a batch with sampled rows")
        if isinstance(backend, GreedySampling):
            _check_most_likely(kit, name, backend, rows)
        _check_ties(kit, name, backend)
    return f"{len(rows)} rows, and {len(_TIED)} with equal logits"


def _check_most_likely(kit: Kit, name: str, backend: GreedySampling, rows: Sequence[SampledRow]) -> None:
    """`most_likely` returns a largest logit in either dtype, and which rows are finite."""
    values = np.stack([row.logits for row in rows])
    values[1, 5], values[3, 0], values[4] = np.nan, np.inf, -np.inf
    good = ~np.isin(np.arange(len(rows)), (1, 3, 4))
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.from_numpy(values).to(dtype)
        tokens, finite = (tensor.to("cpu").numpy() for tensor in backend.most_likely(logits.to(kit.device)))
        if not np.array_equal(finite, good):
            raise Fault(f"{name}: most_likely reports finite rows {finite.tolist()}, but they are {good.tolist()}")
        seen = logits.float().numpy()
        if not np.array_equal(seen[good, tokens[good]], seen[good].max(-1)) or tokens[~good].any():
            raise Fault(
                f"{name}: most_likely does not return the largest {dtype} logit, or 0 for a row that is not finite"
            )


def _check_ties(kit: Kit, name: str, backend: SamplingBackend) -> None:
    """Of equal largest logits one is taken, and the same one alone, next to sampled rows, and by the shortcut."""
    values = np.stack([logits(LARGE, seed) for seed in range(len(_TIED))])
    for row, tied in zip(values, _TIED, strict=True):
        row[list(tied)] = 9.0  # exact in either dtype
    rows = [SampledRow(row, temperature=0.0) for row in values]
    tokens = draw(kit, backend, rows, np.zeros(len(rows)))
    if not all(token in tied for token, tied in zip(tokens, _TIED, strict=True)):
        raise Fault(f"{name}: of equal largest logits, rows of temperature 0 get none of them")
    others = {"next to a sampled row": draw(kit, backend, [SampledRow(values[0]), *rows], np.zeros(len(rows) + 1))[1:]}
    if isinstance(backend, GreedySampling):
        for dtype in (torch.float32, torch.bfloat16):
            most_likely, _ = backend.most_likely(torch.from_numpy(values).to(dtype).to(kit.device))
            others[f"by most_likely in {dtype}"] = most_likely.to("cpu").numpy()
    for what, other in others.items():
        if not np.array_equal(other, tokens):
            index = int((other != tokens).argmax())
            raise Fault(
                f"{name}: of the equal largest logits {_TIED[index]}, sample takes token {tokens[index]} and, {what}, "
                f"token {other[index]}",
                "Take the same of several largest logits on every path, such as the first.",
            )


def distribution(kit: Kit) -> str:
    """With the engine's noise, token frequencies match the probabilities (Pearson's chi-squared test)."""
    row = SampledRow(logits(SMALL, 3), temperature=0.8)
    expected = row.probabilities() * DRAWS
    worst = 1.0
    for name, backend in sampling_backends(kit):
        counts = np.bincount(_draw_all(kit, backend, row, uniform(np.arange(DRAWS), np.arange(DRAWS))), minlength=SMALL)
        p_value = _p_value(counts, expected)
        worst = min(worst, p_value)
        if p_value < SIGNIFICANCE:
            worst_token = int(np.abs(counts - expected).argmax())
            raise Fault(
                f"{name} is biased: of {DRAWS} draws, token {worst_token} came {counts[worst_token]} times where "
                f"{expected[worst_token]:.0f} were expected (p-value {p_value:.1g})"
            )
    return f"{DRAWS} draws; p-value {worst:.2g}"


def exact(kit: Kit) -> str:
    """Without filters, each token is drawn for one interval of the noise, whose length is its probability."""
    rows = [
        SampledRow(logits(SMALL, 11)),
        SampledRow(logits(SMALL, 12), temperature=0.3),
        SampledRow(logits(SMALL, 13), temperature=2.5),
        SampledRow(logits(SMALL, 14) + 30, temperature=0.2),  # exp(150) is too large for float32
        SampledRow(logits(SMALL, 17, spread=0.15), temperature=0.05),  # not greedy
        SampledRow(logits(MEDIUM, 15)),
    ]
    summary = _check_exact(kit, rows, SampledRow(_large_logits(16)))
    return f"{summary}; {_check_candidates(kit)}" if is_native(kit) else summary


def _check_candidates(kit: Kit) -> str:
    """The vocabularies of recent models, of which a sampler may sort a part: the first ids, or the most likely ones."""
    values = logits(HUGE, 18, spread=0.5)
    values[:_FIRST_OF_HUGE] = -np.inf
    row, noise = SampledRow(values), _spread_noise(FEW_NOISE_VALUES // 2)
    expected = row.probabilities()
    candidates = np.argsort(-values)[:_CANDIDATES]
    for name, backend in sampling_backends(kit):
        tokens = _draw_all(kit, backend, row, noise)
        if not expected[tokens].all():
            token = tokens[expected[tokens] == 0][0]
            raise Fault(f"{name}, {HUGE} tokens, masked below {_FIRST_OF_HUGE}: it drew token {token}, which is masked")
        if np.isin(tokens, candidates).all():
            raise Fault(
                f"{name}, {HUGE} tokens without top-k: all of {len(tokens)} draws are among the {_CANDIDATES} most "
                f"likely tokens, which have {expected[candidates].sum():.3f} of the probability"
            )
    return f"one of {HUGE}, without top-k"


def top_k(kit: Kit) -> str:
    """The same with the k most likely tokens; of those that equal the last one, any that fit may be kept, or all."""
    rows = [SampledRow(logits(SMALL, 20 + k), top_k=k) for k in (1, 2, 7, SMALL)]
    rows += [SampledRow(logits(MEDIUM, 24), top_k=300), SampledRow(logits(4 * MEDIUM, 27), top_k=2500)]
    summary = _check_exact(kit, rows, SampledRow(_large_logits(25), top_k=3))
    tied = logits(SMALL, 26)
    tied[[4, 11, 30, 49]] = np.sort(tied)[-4]
    row = SampledRow(tied, top_k=5)
    for name, backend in sampling_backends(kit):
        tokens = _draw_all(kit, backend, row, _spread_noise(NOISE_VALUES))
        fault = _noise_error(tokens, _with_drawn_ties(row, tokens))
        if fault:
            raise Fault(f"{name}, {_describe(row)}, four tokens equal at its end: {fault}")
    return f"{summary}; one with equal logits"


def _with_drawn_ties(row: SampledRow, tokens: npt.NDArray[np.int64]) -> Floats:
    """The row's probabilities, where of the equal tokens at the end of top-k those are kept that were drawn first, or
    all if more were drawn."""
    expected = row.probabilities()
    equal = np.flatnonzero(row.logits == row.logits[expected > 0].min())
    drawn = [*dict.fromkeys(token for token in tokens.tolist() if token in equal)]
    fitting = int((expected[equal] > 0).sum())
    least = expected[equal].max()
    expected[equal] = 0.0
    expected[equal if len(drawn) > fitting else list(dict.fromkeys([*drawn, *equal]))[:fitting]] = least
    probabilities: Floats = expected / expected.sum()
    return probabilities


def top_p(kit: Kit) -> str:
    """The same with the smallest set of most likely tokens whose probabilities reach p."""
    rows = [SampledRow(logits(SMALL, 30), top_p=p) for p in (0.1, 0.55, 0.93)]
    rows.append(SampledRow(logits(MEDIUM, 31), top_p=0.9))
    large = _away_from_boundaries(SampledRow(_large_logits(32), top_p=0.6))
    return _check_exact(kit, [_away_from_boundaries(row) for row in rows], large)


def min_p(kit: Kit) -> str:
    """The same with the tokens that are at least p times as likely as the most likely one."""
    return _check_exact(kit, [SampledRow(logits(SMALL, 40), min_p=p) for p in (0.02, 0.3, 1.0)])


def filter_order(kit: Kit) -> str:
    """The same with all filters: temperature, top-k, top-p, min-p, each applied to the result of the previous one."""
    rows = [
        SampledRow(logits(SMALL, 50), temperature=0.7, top_k=20),
        _away_from_boundaries(SampledRow(logits(SMALL, 51), temperature=1.3, top_k=9, top_p=0.8)),
        _away_from_boundaries(SampledRow(logits(SMALL, 52), temperature=1.5, top_k=30, top_p=0.9, min_p=0.15)),
        _away_from_boundaries(SampledRow(logits(SMALL, 53), top_p=0.7, min_p=0.2)),
    ]
    return _check_exact(kit, rows)


def extremes(kit: Kit) -> str:
    """Noise of 0 and just below 1, and masked logits: a token of probability 0 is never drawn."""
    masked = logits(LARGE, 60, spread=3.0)
    masked[np.random.default_rng(1).random(LARGE) < 0.9] = -np.inf
    one = np.full(SMALL, -np.inf, dtype=np.float32)
    one[17] = -3.0
    cases = [
        SampledRow(masked),
        SampledRow(masked, top_k=40),
        SampledRow(masked, top_p=0.9, temperature=0.6),
        SampledRow(masked, min_p=0.05),
    ]
    for name, backend in sampling_backends(kit):
        for noise in (0.0, 0.5, LARGEST_NOISE):
            for index, token in enumerate(draw(kit, backend, cases, np.full(len(cases), noise))):
                if cases[index].probabilities()[token] == 0.0:
                    raise Fault(f"{name}: with noise {noise!r} it drew token {token}, whose probability is 0")
            if draw(kit, backend, [SampledRow(one)] * 3, np.full(3, noise)).tolist() != [17] * 3:
                raise Fault(f"{name}: with noise {noise!r} it drew another token than the only possible one")
    return f"{len(cases)} rows of {LARGE} tokens, nine tenths of them masked"


def batch(kit: Kit) -> str:
    """A row's token depends only on that row: it is the same alone, in a batch, and in another order."""
    rows = list(_varied_rows())
    noise = uniform(np.arange(len(rows)), np.arange(len(rows)))
    order = np.random.default_rng(2).permutation(len(rows))
    for name, backend in sampling_backends(kit):
        tokens = draw(kit, backend, rows, noise)
        shuffled = draw(kit, backend, [rows[index] for index in order], noise[order])
        alone = np.array([draw(kit, backend, [row], noise[[index]])[0] for index, row in enumerate(rows)])
        for other, what in ((shuffled[np.argsort(order)], "in another order"), (alone, "alone")):
            if not np.array_equal(tokens, other):
                index = int((tokens != other).argmax())
                raise Fault(f"{name}: row {index} gets token {tokens[index]} in a batch and {other[index]} {what}")
    return f"{len(rows)} rows alone, together and shuffled"


def _varied_rows() -> Iterator[SampledRow]:
    for seed in range(6):
        values = logits(997, 70 + seed)
        yield SampledRow(values)
        yield SampledRow(values, temperature=0.0)
        yield SampledRow(values, top_k=12, temperature=0.6)
        yield SampledRow(values, top_p=0.8)
        yield SampledRow(values, min_p=0.1, temperature=1.4)


def _check_exact(kit: Kit, rows: Sequence[SampledRow], large: SampledRow | None = None) -> str:
    for name, backend in sampling_backends(kit):
        for row in rows if large is None else (*rows, large):
            noise = _spread_noise(FEW_NOISE_VALUES if row is large else NOISE_VALUES)
            fault = _noise_error(_draw_all(kit, backend, row, noise), row.probabilities())
            if fault:
                raise Fault(f"{name}, {_describe(row)}: {fault}")
    large_clause = "" if large is None else f"; one of {LARGE} tokens"
    return f"{len(rows)} rows, {NOISE_VALUES} noise values each{large_clause}"


def _spread_noise(count: int) -> Floats:
    """Evenly spaced, increasing noise."""
    noise: Floats = (np.arange(count) + 0.5) / count
    return noise


def _noise_error(tokens: npt.NDArray[np.int64], expected: Floats) -> str:
    """The error in the tokens for evenly spaced, increasing noise; empty if there is none."""
    counts = np.bincount(tokens, minlength=len(expected))
    dropped = np.flatnonzero((counts > 0) & (expected == 0))
    if len(dropped):
        return f"token {dropped[0]} is drawn, but the filters remove it"
    off = np.abs(counts - expected * len(tokens))
    worst = int(off.argmax())
    if off[worst] > 2.0:
        share = counts[worst] / len(tokens)
        return f"token {worst} is drawn for {share:.4f} of the noise; its probability is {expected[worst]:.4f}"
    intervals = 1 + int((tokens[1:] != tokens[:-1]).sum())
    if intervals != int((counts > 0).sum()):
        return f"{int((counts > 0).sum())} tokens come in {intervals} intervals as the noise rises; each must have one"
    return ""


def _draw_all(kit: Kit, backend: SamplingBackend, row: SampledRow, noise: Floats) -> npt.NDArray[np.int64]:
    parts = [noise[first : first + ROWS] for first in range(0, len(noise), ROWS)]
    return np.concatenate([draw(kit, backend, [row] * len(part), part) for part in parts])


def _away_from_boundaries(row: SampledRow) -> SampledRow:
    """The row with top_p halfway between two cumulative probabilities, so that rounding cannot decide what is kept."""
    without = dataclasses.replace(row, top_p=1.0, min_p=0.0).probabilities()
    ends = np.cumsum(np.sort(without)[::-1])
    index = int(np.searchsorted(ends, row.top_p))
    begin = ends[index - 1] if index else 0.0
    return dataclasses.replace(row, top_p=float((begin + ends[index]) / 2))


def _p_value(counts: npt.NDArray[np.int64], expected: Floats) -> float:
    """The p-value of the counts; rare tokens are counted together."""
    rare = expected < MIN_EXPECTED
    observed = np.append(counts[~rare], counts[rare].sum()).astype(np.float64)
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0.0:
        if observed[-1]:
            return 0.0
        observed, expected = observed[:-1], expected[:-1]
    return _chi_squared_tail(float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1)


def _chi_squared_tail(value: float, degrees_of_freedom: int) -> float:
    """P(X >= value) of the chi-squared distribution, by the Wilson-Hilferty approximation (PNAS 17, 1931)."""
    spread = 2.0 / (9.0 * degrees_of_freedom)
    z = ((value / degrees_of_freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def _describe(row: SampledRow) -> str:
    parts = [f"{len(row.logits)} tokens, temperature {row.temperature:g}"]
    parts += [f"top_k {row.top_k}"] if row.top_k else []
    parts += [f"top_p {row.top_p:.3f}"] if row.top_p < 1 else []
    parts += [f"min_p {row.min_p:g}"] if row.min_p else []
    return ", ".join(parts)
