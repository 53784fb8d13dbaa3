"""Counter-based noise: the published generator, as a function of only (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest

from srv.sample.noise import SlotNoise, philox4x32, uniform

# Known answers for philox4x32-10, as published with the Random123 library (file kat_vectors).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_generator_gives_the_published_answers(counter: str, key: str, want: str) -> None:
    assert philox4x32(words(counter), words(key)).tolist() == words(want).tolist()


def test_known_answers_hold_within_a_vector() -> None:
    counters = np.concatenate([words(counter) for counter, _, _ in KNOWN], axis=1)
    keys = np.concatenate([words(key) for _, key, _ in KNOWN], axis=1)
    wants = np.concatenate([words(want) for _, _, want in KNOWN], axis=1)
    assert np.array_equal(philox4x32(counters, keys), wants)


def test_the_first_number_is_fixed() -> None:
    """53 bits of the first two words, the second one as the upper half. A change here changes every seeded output."""
    want = (((0xE169C58D << 32) | 0x6627E8D5) >> 11) * 2.0**-53
    assert uniform([0], [0]).tolist() == [want]


def test_a_number_depends_only_on_seed_and_position() -> None:
    seeds, positions = [3, 3, 9, 2**63 - 1, 0], [0, 1, 1, 2**40, 2**62]
    together = uniform(seeds, positions).tolist()
    alone = [uniform([seed], [position])[0] for seed, position in zip(seeds, positions, strict=True)]
    assert together == alone
    assert len(set(together)) == 5


def test_high_halves_of_seed_and_position_count() -> None:
    assert len(set(uniform([1, 1 + 2**32, 1, 2**32], [5, 5, 5 + 2**32, 5]).tolist())) == 4


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_are_uniform_and_uncorrelated(along: str) -> None:
    count = 100_000
    steps, still = np.arange(count), np.full(count, 1234)
    numbers = uniform(still, steps) if along == "positions" else uniform(steps, still)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    seen = np.histogram(numbers, bins=100, range=(0, 1))[0]
    # The 99.99 % quantile of chi-square with 99 degrees of freedom.
    assert np.square(seen - count / 100).sum() / (count / 100) < 160
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / count**0.5


def test_no_rows_have_no_numbers() -> None:
    assert uniform([], []).shape == (0,)


def test_cached_noise_equals_computed_noise() -> None:
    """Across block boundaries, jumps back, changed seeds, and slots that start and end."""
    noise, random = SlotNoise(8), np.random.default_rng(0)
    for _ in range(200):
        slots = random.permutation(8)[: random.integers(1, 8)]
        seeds, positions = random.integers(0, 4, len(slots)), random.integers(0, 200, len(slots))
        assert np.array_equal(noise.draw(slots, seeds, positions), uniform(seeds, positions))
