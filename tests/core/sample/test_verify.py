"""Which sampled tokens of rows with drafts count, and the noise of positions that only the device knows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_transfers import HOST_TRANSFERS

from srv.sample.noise import DeviceNoise, uniform
from srv.sample.verify import DraftShape

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("fed", "sampled", "accepted"),
    [
        ([9, 1, 2, 3], [1, 2, 3, 4], 4),
        ([9, 1, 2, 3], [1, 2, 7, 4], 3),
        ([9, 1, 2, 3], [5, 2, 3, 4], 1),
        ([9, 1, 2, 3], [1, 7, 3, 4], 2),
    ],
    ids=["all", "the last is wrong", "the first is wrong, the others fit", "the second is wrong, the last fits"],
)
def test_tokens_count_until_the_first_wrong_draft(fed: list[int], sampled: list[int], accepted: int) -> None:
    shape = DraftShape([4], HOST_TRANSFERS)
    assert shape.accepted(torch.tensor(fed), torch.tensor(sampled)).tolist() == [accepted]


def test_rows_of_different_lengths_are_verified_together() -> None:
    """The first token of a row was not drafted, whatever the row before it has sampled."""
    shape = DraftShape([3, 1, 2], HOST_TRANSFERS)
    fed, sampled = torch.tensor([9, 1, 2, 4, 8, 6]), torch.tensor([1, 2, 4, 8, 6, 7])
    accepted = shape.accepted(fed, sampled)
    assert accepted.tolist() == [3, 1, 2]
    assert shape.kept(accepted).tolist() == [True] * 6
    assert shape.last(accepted).tolist() == [2, 3, 5]
    assert shape.positions(torch.tensor([10, 20, 30])).tolist() == [10, 11, 12, 20, 30, 31]
    rejected = shape.accepted(torch.tensor([9, 5, 2, 4, 8, 5]), sampled)
    assert shape.kept(rejected).tolist() == [True, False, False, True, True, False]


def test_noise_on_the_device_is_that_of_seed_and_position() -> None:
    """Across blocks, and after the slot was given to another seed."""
    noise = DeviceNoise(3, HOST_TRANSFERS)
    for seed, first in ((5, 0), (5, 60), (6, 60), (6, 250), (5, 1000)):
        noise.ensure([2], [seed], [first], [first + 9])
        positions = np.arange(first, first + 10)
        drawn = noise.draw(torch.full((10,), 2), torch.from_numpy(positions))
        assert drawn.tolist() == uniform(np.full(10, seed), positions).tolist()
