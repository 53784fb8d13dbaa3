"""L1: sampling backends, against the distribution that the contract describes, computed here in float64.

The order of the kept tokens is the backend's own, so the exact check asks what every order must give: as the noise
rises from 0 to 1, each kept token is drawn for one stretch of it, as long as the token is probable.

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
from srv.testing.conformance.setups import sampling_backends

Floats = npt.NDArray[np.float64]

ROWS = 256  # drawn at once
STEPS = 2048  # noise values of the exact check
DRAWS = 8192  # of the statistical one
SMALL, LARGE = 50, 32003  # vocabularies; the large one is no multiple of anything
LEAST_EXPECTED = 8.0  # draws of a token below which the statistical check takes it with others
CHANCE = 1e-9  # of the statistical check failing a right sampler; the draws are always the same
LARGEST_NOISE = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class Row:
    """One row to draw from: logits, float32 [vocab], and what is kept of them."""

    logits: npt.NDArray[np.float32]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def probabilities(self) -> Floats:
        """float64 [vocab]: temperature, then top-k, top-p, min-p, each on what the one before has left."""
        scaled = self.logits.astype(np.float64) / (self.temperature or 1.0)
        weights = np.exp(scaled - scaled.max())
        order = np.argsort(-weights, kind="stable")
        kept = np.ones(len(weights), dtype=bool)
        if self.top_k:
            kept[order[self.top_k :]] = False
        if self.top_p < 1.0:
            shares = np.where(kept, weights, 0.0)[order] / weights[kept].sum()
            kept[order[np.cumsum(shares) - shares >= self.top_p]] = False
        if self.min_p:
            kept &= weights >= self.min_p * weights.max()
        weights = np.where(kept, weights, 0.0)
        found: Floats = weights / weights.sum()
        return found


def draw(kit: Kit, backend: SamplingBackend, rows: Sequence[Row], noise: Floats) -> npt.NDArray[np.int64]:
    """One token a row, as the engine would ask for them. Fault if the answer is no row of tokens on the device."""
    batch = make_batch(kit, rows, noise)
    tokens: object = backend.sample(batch)
    if not isinstance(tokens, torch.Tensor) or tokens.dtype != torch.int64 or tuple(tokens.shape) != (len(rows),):
        shown = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise Fault(f"sample gave {shown} for {len(rows)} rows, not int64 [{len(rows)}]")
    if not same_device(tokens.device, kit.device):
        raise Fault(f"sample gave tokens on {tokens.device}, but the platform's device is {kit.device}")
    found: npt.NDArray[np.int64] = tokens.to("cpu").numpy()
    vocabulary = len(rows[0].logits)
    if found.min() < 0 or found.max() >= vocabulary:
        raise Fault(f"sample gave tokens from {found.min()} to {found.max()}; the vocabulary has {vocabulary}")
    return found


def make_batch(kit: Kit, rows: Sequence[Row], noise: Floats) -> SamplingBatch:
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
    """Random logits, no two of them near each other among the likely ones."""
    values = np.random.default_rng(seed).normal(0.0, spread, vocabulary)
    order = np.argsort(values)
    values[order] += np.arange(vocabulary) * 1e-5
    return values.astype(np.float32)


def placement(kit: Kit) -> str:
    """int64 [rows] on the platform's device, within the vocabulary."""
    rows = [Row(logits(SMALL, seed)) for seed in range(7)]
    for _, backend in sampling_backends(kit):
        draw(kit, backend, rows, np.linspace(0.05, 0.95, len(rows)))
        draw(kit, backend, [dataclasses.replace(row, temperature=0.0) for row in rows], np.zeros(len(rows)))
    return "int64, one a row, on the device"


def greedy(kit: Kit) -> str:
    """Temperature 0 takes the largest logit, alone and beside rows that are drawn."""
    rows = [Row(logits(SMALL, seed), temperature=0.0) for seed in range(9)]
    best = np.array([row.logits.argmax() for row in rows])
    mixed = [row if index % 2 else dataclasses.replace(row, temperature=0.7) for index, row in enumerate(rows)]
    for name, backend in sampling_backends(kit):
        if not np.array_equal(draw(kit, backend, rows, np.zeros(len(rows))), best):
            raise Fault(f"{name}: rows of temperature 0 do not get the token of the largest logit")
        tokens = draw(kit, backend, mixed, np.full(len(rows), LARGEST_NOISE))
        if not np.array_equal(tokens[1::2], best[1::2]):
            raise Fault(f"{name}: rows of temperature 0 get other tokens beside rows that are drawn")
        if isinstance(backend, GreedySampling):
            _short_way(kit, name, backend, rows)
    return f"{len(rows)} rows"


def _short_way(kit: Kit, name: str, backend: GreedySampling, rows: Sequence[Row]) -> None:
    """`most_likely` takes a largest logit of either dtype, and tells the rows that have none."""
    values = np.stack([row.logits for row in rows])
    values[1, 5], values[3, 0], values[4] = np.nan, np.inf, -np.inf
    good = ~np.isin(np.arange(len(rows)), (1, 3, 4))
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.from_numpy(values).to(dtype)
        tokens, finite = (each.to("cpu").numpy() for each in backend.most_likely(logits.to(kit.device)))
        if not np.array_equal(finite, good):
            raise Fault(f"{name}: most_likely calls rows finite: {finite.tolist()}, but they are: {good.tolist()}")
        seen = logits.float().numpy()
        if not np.array_equal(seen[good, tokens[good]], seen[good].max(-1)) or tokens[~good].any():
            raise Fault(f"{name}: most_likely does not give the largest logit of {dtype}, or not 0 where there is none")


def bias(kit: Kit) -> str:
    """Over the engine's own noise, tokens come as often as they are probable (Pearson's chi-squared test)."""
    row = Row(logits(SMALL, 3), temperature=0.8)
    wanted = row.probabilities() * DRAWS
    worst = 1.0
    for name, backend in sampling_backends(kit):
        counts = np.bincount(_tokens(kit, backend, row, uniform(np.arange(DRAWS), np.arange(DRAWS))), minlength=SMALL)
        chance = _chance(counts, wanted)
        worst = min(worst, chance)
        if chance < CHANCE:
            most = int(np.abs(counts - wanted).argmax())
            raise Fault(
                f"{name} is biased: of {DRAWS} draws, token {most} came {counts[most]} times where "
                f"{wanted[most]:.0f} were to be expected (chance of such counts: {chance:.1g})"
            )
    return f"{DRAWS} draws; chance of such counts if it is right: {worst:.2g}"


def exact(kit: Kit) -> str:
    """Without filters, each token is drawn for one stretch of the noise, as long as it is probable."""
    rows = [Row(logits(SMALL, 11)), Row(logits(SMALL, 12), temperature=0.3), Row(logits(SMALL, 13), temperature=2.5)]
    return _exact(kit, rows)


def top_k(kit: Kit) -> str:
    """The same with the k most likely tokens kept."""
    return _exact(kit, [Row(logits(SMALL, 20 + k), top_k=k) for k in (1, 2, 7, SMALL)])


def top_p(kit: Kit) -> str:
    """The same with the smallest set of likely tokens kept that reaches the probability p."""
    return _exact(kit, [_away_from_borders(Row(logits(SMALL, 30), top_p=p)) for p in (0.1, 0.55, 0.93)])


def min_p(kit: Kit) -> str:
    """The same with those tokens kept that are at least p times as likely as the most likely one."""
    return _exact(kit, [Row(logits(SMALL, 40), min_p=p) for p in (0.02, 0.3, 1.0)])


def together(kit: Kit) -> str:
    """The filters in one row: temperature, top-k, top-p, min-p, each on what the one before has left."""
    rows = [
        Row(logits(SMALL, 50), temperature=0.7, top_k=20),
        _away_from_borders(Row(logits(SMALL, 51), temperature=1.3, top_k=9, top_p=0.8)),
        _away_from_borders(Row(logits(SMALL, 52), temperature=1.5, top_k=30, top_p=0.9, min_p=0.15)),
        _away_from_borders(Row(logits(SMALL, 53), top_p=0.7, min_p=0.2)),
    ]
    return _exact(kit, rows)


def extremes(kit: Kit) -> str:
    """Noise of 0 and just below 1, and masked logits: a token of probability 0 never comes."""
    masked = logits(LARGE, 60, spread=3.0)
    masked[np.random.default_rng(1).random(LARGE) < 0.9] = -np.inf
    one = np.full(SMALL, -np.inf, dtype=np.float32)
    one[17] = -3.0
    cases = [Row(masked), Row(masked, top_k=40), Row(masked, top_p=0.9, temperature=0.6), Row(masked, min_p=0.05)]
    for name, backend in sampling_backends(kit):
        for noise in (0.0, 0.5, LARGEST_NOISE):
            for index, token in enumerate(draw(kit, backend, cases, np.full(len(cases), noise))):
                if cases[index].probabilities()[token] == 0.0:
                    raise Fault(f"{name}: with noise {noise!r} it drew token {token}, whose probability is 0")
            if draw(kit, backend, [Row(one)] * 3, np.full(3, noise)).tolist() != [17] * 3:
                raise Fault(f"{name}: with noise {noise!r} it drew another token than the only one left")
    return f"{len(cases)} rows over {LARGE} tokens, nine tenths of them masked"


def batch(kit: Kit) -> str:
    """A row's token depends on that row alone: alone, in a batch, in another order, it is the same."""
    rows = list(_varied())
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


def _varied() -> Iterator[Row]:
    for seed in range(6):
        values = logits(997, 70 + seed)
        yield Row(values)
        yield Row(values, temperature=0.0)
        yield Row(values, top_k=12, temperature=0.6)
        yield Row(values, top_p=0.8)
        yield Row(values, min_p=0.1, temperature=1.4)


def _exact(kit: Kit, rows: Sequence[Row]) -> str:
    noise = (np.arange(STEPS) + 0.5) / STEPS
    for name, backend in sampling_backends(kit):
        for row in rows:
            fault = _against(_tokens(kit, backend, row, noise), row.probabilities())
            if fault:
                raise Fault(f"{name}, {_shown(row)}: {fault}")
    return f"{len(rows)} rows, {STEPS} values of the noise each"


def _against(tokens: npt.NDArray[np.int64], wanted: Floats) -> str:
    """What is wrong with the tokens of evenly spaced, rising noise; empty if nothing is."""
    counts = np.bincount(tokens, minlength=len(wanted))
    dropped = np.flatnonzero((counts > 0) & (wanted == 0))
    if len(dropped):
        return f"token {dropped[0]} is drawn, but the filters drop it"
    off = np.abs(counts - wanted * STEPS)
    most = int(off.argmax())
    if off[most] > 2.0:
        return (
            f"token {most} is drawn for {counts[most] / STEPS:.4f} of the noise; its probability is {wanted[most]:.4f}"
        )
    stretches = 1 + int((tokens[1:] != tokens[:-1]).sum())
    if stretches != int((counts > 0).sum()):
        return f"{int((counts > 0).sum())} tokens come in {stretches} stretches as the noise rises; each must have one"
    return ""


def _tokens(kit: Kit, backend: SamplingBackend, row: Row, noise: Floats) -> npt.NDArray[np.int64]:
    parts = [noise[first : first + ROWS] for first in range(0, len(noise), ROWS)]
    return np.concatenate([draw(kit, backend, [row] * len(part), part) for part in parts])


def _away_from_borders(row: Row) -> Row:
    """The row with top_p moved to the middle of the step that it falls on: rounding must not decide what is kept."""
    without = dataclasses.replace(row, top_p=1.0, min_p=0.0).probabilities()
    ends = np.cumsum(np.sort(without)[::-1])
    index = int(np.searchsorted(ends, row.top_p))
    begin = ends[index - 1] if index else 0.0
    return dataclasses.replace(row, top_p=float((begin + ends[index]) / 2))


def _chance(counts: npt.NDArray[np.int64], wanted: Floats) -> float:
    """The probability of counts at least this far from what was to be expected; rare tokens are taken together."""
    rare = wanted < LEAST_EXPECTED
    seen = np.append(counts[~rare], counts[rare].sum()).astype(np.float64)
    expected = np.append(wanted[~rare], wanted[rare].sum())
    if expected[-1] == 0.0:
        if seen[-1]:
            return 0.0
        seen, expected = seen[:-1], expected[:-1]
    return _chi_squared_tail(float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1)


def _chi_squared_tail(value: float, freedom: int) -> float:
    """P(X >= value) of the chi-squared distribution, by Wilson and Hilferty's cube root (PNAS 17, 1931)."""
    spread = 2.0 / (9.0 * freedom)
    z = ((value / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def _shown(row: Row) -> str:
    words = [f"temperature {row.temperature:g}"]
    words += [f"top_k {row.top_k}"] if row.top_k else []
    words += [f"top_p {row.top_p:.3f}"] if row.top_p < 1 else []
    words += [f"min_p {row.min_p:g}"] if row.min_p else []
    return ", ".join(words)
