"""What recurrent layers have in common, and what they receive beside their inputs: the states of the step's rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from srv.errors import InternalError
from srv.models.layers.linear import Projection


class LayerStates(NamedTuple):
    """The states of one layer, and which of them are those of the step's rows.

    tensors: by the names of `srv.specs.Recurrent.states`, ``[slots + 1, *shape]``; the layer reads a row's slot and
    writes its new state there. slots: int64 [rows] on the device; 0 for rows of padding. lens: the tokens of each row,
    at least 1, on the host; in a captured step, 1.
    """

    tensors: Mapping[str, Tensor]
    slots: Tensor
    lens: Sequence[int]


StatesOf: TypeAlias = Callable[[int, int], LayerStates]  # (recurrent cache group, index of the layer within it)


class StateLayer(nn.Module, ABC):
    """A layer that mixes tokens by states of a fixed size, in the place of attention."""

    @abstractmethod
    def forward(self, x: Tensor, states_of: StatesOf) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the states of the rows advance by their tokens."""

    @property
    @abstractmethod
    def projections(self) -> tuple[Projection, ...]:
        """The layers with weight matrices."""

    @abstractmethod
    def weight_views(self) -> dict[str, Tensor]:
        """Those of weights outside `projections`, by their names in the checkpoint."""

    def prepare_loaded(self) -> None:
        """Compute what derives from the weights. Called once, after loading."""


def no_states(group: int, index: int) -> LayerStates:
    """For steps of models without recurrent layers."""
    raise InternalError(f"layer {index} of recurrent group {group} asks for states, but the step has none")
