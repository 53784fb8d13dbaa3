"""Algorithms that are declared and not implemented yet: their drafters have weights of their own. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_GIB = 2**30


class PlannedAlgorithm(NamedTuple):
    """What is known of it. `device_bytes`: of the drafter's weights and KV pool. `model`: it is a model by itself."""

    device_bytes: float
    model: bool = False


PLANNED: Mapping[str, PlannedAlgorithm] = MappingProxyType(
    {
        "EAGLE": PlannedAlgorithm(2.0 * _GIB),
        "EAGLE3": PlannedAlgorithm(2.0 * _GIB),
        "NEXTN": PlannedAlgorithm(2.0 * _GIB),
        "STANDALONE": PlannedAlgorithm(6.0 * _GIB, model=True),
    }
)
