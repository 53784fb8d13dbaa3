"""What mixes the tokens of a layer: attention, or states of a fixed size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.checkpoints.slices import Slice
from srv.models.layers.weight_module import WeightModule


class Mixer(WeightModule, ABC):
    """Made from a `srv.models.blueprint.Mixer`. Of several ranks, each has a part, and its result is a partial sum."""

    slices: Mapping[str, Slice] = MappingProxyType({})  # of its own weights, of which this rank has a part

    def weight_slices(self) -> dict[str, Slice]:
        return dict(self.slices)

    @abstractmethod
    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; what is kept of the requests of the rows advances by their tokens."""
