"""What every configuration of a native architecture says of its model, by walks over the model's tree. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Self

from srv.models import derive
from srv.models.architectures.architecture import Pooled
from srv.models.blueprint import Part
from srv.models.derive import DividedSizes, ModelOps
from srv.specs import AttentionLayer


class Described:
    """A `NativeConfig` (`srv.models.architectures.architecture`) whose answers follow from its tree."""

    pooled: Pooled | None = None

    @functools.cached_property
    def tree(self) -> Part:
        """The blueprint of the model."""
        raise NotImplementedError

    @functools.cached_property
    def parameters(self) -> int:
        return derive.parameters(self.tree)

    @functools.cached_property
    def projection_params(self) -> int:
        return derive.projection_parameters(self.tree)

    @functools.cached_property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return derive.attention_layers(self.tree)

    @functools.cached_property
    def divided(self) -> DividedSizes | None:
        return derive.divided(self.tree)

    def of_rank(self, ranks: int) -> Described:
        return RankPart(self.tree.of_rank(ranks))

    def model_ops(self, dtype: str) -> ModelOps:
        return derive.model_ops(self.tree, dtype)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values of some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True)
class RankPart(Described):
    """What one of several ranks has of a model."""

    part: Part

    @functools.cached_property
    def tree(self) -> Part:
        return self.part
