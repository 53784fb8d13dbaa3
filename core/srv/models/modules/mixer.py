"""What mixes the tokens of a layer: attention, or states of a fixed size."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.layers.weight_module import WeightModule


class Mixer(WeightModule, ABC):
    """Made from a `srv.models.blueprint.Mixer`."""

    @abstractmethod
    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; what is kept of the requests of the rows advances by their tokens."""
