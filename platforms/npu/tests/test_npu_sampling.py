"""Both sampling backends against the contract, worked out in float64: filters, their order, the noise, and its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import context
from torch import Tensor

from srv.platform.interface import SamplingBatch
from srv_npu.platform import NpuPlatform
from srv_npu.sampling import AscendSampling, TorchSampling

VOCAB = 3000  # larger than the operator's largest top-k, and no multiple of the block
BACKENDS = (TorchSampling, AscendSampling)
EDGE = 1e-4  # rows whose noise falls this near to a border between two tokens may go either way


def batch(logits: Tensor, device: torch.device, **fields: Any) -> SamplingBatch:
    """Rows of `logits`; what is not given filters nothing. Lists are one value a row."""
    rows, vocab = logits.shape
    values = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5} | fields
    dtypes = {"top_k": torch.int32, "uniform": torch.float64}
    tensors = {
        name: torch.as_tensor(value, dtype=dtypes.get(name, torch.float32)).expand(rows).contiguous()
        for name, value in values.items()
    }
    drawn = tensors["temperature"] > 0
    limits = tensors["top_k"][drawn & (tensors["top_k"] < vocab)]
    return SamplingBatch(
        logits=logits.to(device),
        **{name: tensor.to(device) for name, tensor in tensors.items()},
        all_greedy=not bool(drawn.any()),
        any_top_k=limits.numel() > 0,
        any_top_p=bool((tensors["top_p"][drawn] < 1).any()),
        any_min_p=bool((tensors["min_p"][drawn] > 0).any()),
        largest_top_k=int(limits.max()) if limits.numel() else 0,
    )


def shares(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """float64 [vocab]: what is left of the distribution after the filters, in order of token ids."""
    scaled = logits.double() / temperature
    ordered, ids = scaled.sort(descending=True, stable=True)
    weights = ordered.softmax(-1)
    weights[top_k:] = 0
    weights /= weights.sum()
    if top_p < 1:
        weights[(weights.cumsum(-1) - weights >= top_p) & (torch.arange(len(ids)) > 0)] = 0
    weights[weights < min_p * weights[0]] = 0
    return torch.zeros_like(weights).scatter_(0, ids, weights / weights.sum())


def sampled(platform: NpuPlatform, kind: Any, sampling_batch: SamplingBatch) -> list[int]:
    tokens: list[int] = kind(context(platform)).sample(sampling_batch).cpu().tolist()
    return tokens


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, VOCAB, 1.0, 0.0),
        (0.7, 20, 1.0, 0.0),
        (1.5, 1024, 1.0, 0.0),
        (1.5, 1025, 1.0, 0.0),
        (1.0, VOCAB, 0.8, 0.0),
        (1.3, 40, 0.6, 0.0),
        (1.3, 2000, 0.9, 0.0),
        (1.0, VOCAB, 1.0, 0.2),
        (0.9, 50, 0.9, 0.05),
        (1.0, 1, 1.0, 0.0),
        (1.0, VOCAB, 1e-6, 0.0),
        (1.0, VOCAB, 1e-50, 0.0),  # above 0 for a request, 0 as float32: the best token stays all the same
    ],
)
def test_the_token_drawn_is_the_one_at_the_noise(
    platform: NpuPlatform, kind: Any, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    rows = 64
    logits, uniform = torch.randn(rows, VOCAB) * 3, torch.rand(rows, dtype=torch.float64)
    sampling_batch = batch(
        logits, platform.device(0), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform
    )
    compared = 0
    for row, token in enumerate(sampled(platform, kind, sampling_batch)):
        cumulative = shares(logits[row], temperature, top_k, top_p, min_p).cumsum(-1)
        if float((cumulative - uniform[row]).abs().min()) > EDGE:
            assert token == int((cumulative <= uniform[row]).sum()), f"row {row}"
            compared += 1
    assert compared > rows // 4


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_row_alone_draws_what_it_draws_among_others(platform: NpuPlatform, kind: Any) -> None:
    """One row of each kind: greedy, unfiltered, top-k of both sizes, top-p, both, min-p."""
    settings: dict[str, list[float]] = {
        "temperature": [0, 1, 0.8, 1.2, 1, 1, 0.9],
        "top_k": [VOCAB, VOCAB, 7, 1500, VOCAB, 30, VOCAB],
        "top_p": [1, 1, 1, 1, 0.7, 0.8, 1],
        "min_p": [0, 0, 0, 0, 0, 0, 0.1],
        "uniform": [0.9, 0.31, 0.77, 0.5, 0.99, 0.01, 0.6],
    }
    logits = torch.randn(7, VOCAB) * 2
    together = sampled(platform, kind, batch(logits, platform.device(0), **settings))
    alone = [
        sampled(
            platform,
            kind,
            batch(logits[row : row + 1], platform.device(0), **{k: [v[row]] for k, v in settings.items()}),
        )[0]
        for row in range(7)
    ]
    assert together == alone
    assert together[0] == int(logits[0].argmax())


@pytest.mark.parametrize("kind", BACKENDS)
def test_noise_at_both_ends_draws_a_token_of_some_weight(platform: NpuPlatform, kind: Any) -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 700] = logits[:, 2000] = 1.0
    uniform = [0.0, float(torch.nextafter(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0)))]
    sampling_batch = batch(logits, platform.device(0), top_p=0.99, uniform=uniform)
    assert sampled(platform, kind, sampling_batch) == [700, 2000]


@pytest.mark.parametrize("kind", BACKENDS)
def test_frequencies_follow_the_distribution(platform: NpuPlatform, kind: Any) -> None:
    """20,000 draws of one distribution over 8 tokens; each count within five standard deviations."""
    draws, probabilities = 20_000, torch.tensor([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01], dtype=torch.float64)
    logits = probabilities.log().float().expand(draws, -1).contiguous()
    sampling_batch = batch(logits, platform.device(0), uniform=torch.rand(draws, dtype=torch.float64))
    counts = torch.bincount(torch.tensor(sampled(platform, kind, sampling_batch)), minlength=8)
    deviation = (draws * probabilities * (1 - probabilities)).sqrt()
    assert bool(((counts - draws * probabilities).abs() < 5 * deviation).all())
