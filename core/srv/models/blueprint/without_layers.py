"""Kinds of parts that only families without native layers have. Torch-free; `srv.models.blueprint` has the others."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from srv.models.blueprint import Attention, Experts, Part, Recurrent, Weight


@dataclass(frozen=True)
class Group(Part):
    """Parts by their names, such as those of a vision tower."""

    inner: tuple[Part, ...]

    def parts(self) -> Iterator[tuple[str, Part]]:
        return ((part.name, part) for part in self.inner)


@dataclass(frozen=True)
class UncachedAttention(Attention):
    """Attention to keys and values of another layer, or of images, so that tokens of its layer keep nothing."""

    def cache(self, dtype: str) -> None:
        return None


@dataclass(frozen=True)
class UngatedExperts(Experts):
    """Experts that are MLPs without a gate."""

    unserved: ClassVar[str] = "experts without a gate are not implemented natively"

    def weights(self) -> Iterator[Weight]:
        return (weight for weight in super().weights() if ".gate_proj." not in weight.name)

    @functools.cached_property
    def projected(self) -> int:
        return self.count * 2 * self.inner * self.hidden


@dataclass(frozen=True)
class States(Recurrent):
    """A recurrent layer of parts without order. `conv`, `kept`: as `Recurrent.convolved` and `Recurrent.state`."""

    inner: tuple[Part, ...]
    conv: tuple[int, int] | None
    kept: tuple[int, ...] | None

    def parts(self) -> Iterator[tuple[str, Part]]:
        return ((part.name, part) for part in self.inner)

    @property
    def convolved(self) -> tuple[int, int] | None:
        return self.conv

    @property
    def state(self) -> tuple[int, ...] | None:
        return self.kept
