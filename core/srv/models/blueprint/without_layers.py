"""Kinds of parts that only families without native layers have. Torch-free; `srv.models.blueprint` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from srv.models.blueprint import Attention, Part, Recurrent


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
