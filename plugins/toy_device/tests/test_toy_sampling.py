"""Sampling keeps the contract: filters in order, the token that the noise points to, rows independent."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from srv.platform.interface import BackendContext, SamplingBatch
from srv.platform.transfers import Transfers
from srv.specs import ModelFacts
from srv_toy_device.device import Accelerator
from srv_toy_device.limits import sampling_bytes
from srv_toy_device.platform import ToyPlatform
from srv_toy_device.sampling import ToySampling

VOCAB = 50


@pytest.fixture
def backend(toy: Accelerator) -> ToySampling:
    platform = ToyPlatform(toy)
    return ToySampling(BackendContext(platform, platform.device(0), None, 8, Transfers(platform, platform.device(0))))


def batch(
    logits: Tensor,
    uniform: Sequence[float],
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    every_flag: bool = False,
) -> SamplingBatch:
    rows, vocab = logits.shape
    top_k = vocab if top_k is None else top_k

    def column(value: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value if isinstance(value, Sequence) else [value] * rows, dtype=dtype)

    temperatures, ks = column(temperature, torch.float32), column(top_k, torch.int32)
    ps, mins = column(top_p, torch.float32), column(min_p, torch.float32)
    return SamplingBatch(
        logits=logits.float().to("toy"),
        temperature=temperatures.to("toy"),
        top_k=ks.to("toy"),
        top_p=ps.to("toy"),
        min_p=mins.to("toy"),
        uniform=column(list(uniform), torch.float64).to("toy"),
        all_greedy=bool((temperatures == 0).all()) and not every_flag,
        any_top_k=every_flag or bool((ks < vocab).any()),
        any_top_p=every_flag or bool((ps < 1).any()),
        any_min_p=every_flag or bool((mins > 0).any()),
        largest_top_k=int(ks.max()),
    )


def kept(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[tuple[int, float]]:
    """The contract, one row at a time: (token, probability) of the kept tokens, best first."""
    probabilities = (logits.double() / temperature).softmax(-1)
    row = sorted(enumerate(probabilities.tolist()), key=lambda entry: -entry[1])[:top_k]
    total, before, nucleus = sum(p for _, p in row), 0.0, []
    for token, p in row:
        if before / total < top_p or top_p == 1.0:
            nucleus.append((token, p))
        before += p
    nucleus = [(token, p) for token, p in nucleus if p >= min_p * nucleus[0][1]]
    total = sum(p for _, p in nucleus)
    return [(token, p / total) for token, p in nucleus]


def test_greedy_takes_the_largest(backend: ToySampling) -> None:
    logits = torch.randn(4, VOCAB)
    tokens = backend.sample(batch(logits, [0.9] * 4, temperature=0.0))
    assert tokens.dtype is torch.int64
    assert tokens.device.type == "toy"
    assert tokens.tolist() == logits.argmax(-1).tolist()
    mixed = backend.sample(batch(logits, [0.9] * 4, temperature=[0.0, 1.0, 0.0, 1.0])).tolist()
    assert [mixed[0], mixed[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(VOCAB, 1.0, 0.0), (5, 1.0, 0.0), (VOCAB, 0.7, 0.0), (VOCAB, 1.0, 0.2), (8, 0.8, 0.1), (1, 0.5, 0.9)],
)
def test_the_noise_selects_from_what_the_filters_keep(
    backend: ToySampling, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, VOCAB).expand(40, VOCAB)
    uniform = [(index + 0.5) / 40 for index in range(40)]
    tokens = backend.sample(batch(logits, uniform, temperature, top_k, top_p, min_p)).tolist()
    entries = kept(logits[0], temperature, top_k, top_p, min_p)
    for noise, token in zip(uniform, tokens, strict=True):
        cumulative, wanted = 0.0, -1
        for wanted, probability in entries:  # noqa: B007
            cumulative += probability
            if cumulative > noise:
                break
        assert token == wanted


def test_the_least_and_the_most_noise_stay_within_what_is_possible(backend: ToySampling) -> None:
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, 7] = 1.0
    logits[:, 9] = 0.5
    tokens = backend.sample(batch(logits, [0.0, 1 - 2**-53], top_p=0.999999))
    assert tokens.tolist() == [7, 9]
    assert backend.sample(batch(logits, [0.0, 1 - 2**-53], top_p=0.0)).tolist() == [7, 7]


def test_a_row_does_not_depend_on_its_neighbours(backend: ToySampling) -> None:
    logits = torch.randn(6, VOCAB)
    logits[1] = logits[0]
    noise = [0.31, 0.31, 0.99, 0.5, 0.001, 0.7]
    plain = backend.sample(batch(logits, noise)).tolist()
    assert plain[0] == plain[1]
    assert backend.sample(batch(logits, noise, every_flag=True)).tolist() == plain
    for row in range(6):
        assert backend.sample(batch(logits[row : row + 1], noise[row : row + 1])).tolist() == [plain[row]]


def test_many_rows_are_drawn_a_few_at_a_time(backend: ToySampling, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, VOCAB)
    noise = [(row + 0.5) / 7 for row in range(7)]
    together = backend.sample(batch(logits, noise, top_k=[3, 9, 50, 2, 7, 50, 1])).tolist()
    monkeypatch.setattr("srv_toy_device.sampling.SORTED_LOGITS", 2 * VOCAB)
    assert backend.sample(batch(logits, noise, top_k=[3, 9, 50, 2, 7, 50, 1])).tolist() == together


def test_memory_stays_within_what_the_facts_reserve(toy: Accelerator, backend: ToySampling) -> None:
    rows = batch(torch.randn(30, 30_000), [0.5] * 30, top_k=5, top_p=0.5, min_p=0.1)
    before, toy.memory.peak = toy.memory_allocated(), 0
    backend.sample(rows)
    assert toy.max_memory_allocated() - before <= sampling_bytes(cast(ModelFacts, SimpleNamespace(vocab_size=30_000)))


def test_equal_logits_are_drawn_in_a_fixed_order(backend: ToySampling) -> None:
    logits = torch.zeros(4, 4)
    assert backend.sample(batch(logits, [0.0, 0.25, 0.5, 0.75])).tolist() == [0, 1, 2, 3]
    assert backend.sample(batch(logits, [0.0, 0.49, 0.5, 0.99], top_k=2)).tolist() == [0, 0, 1, 1]
