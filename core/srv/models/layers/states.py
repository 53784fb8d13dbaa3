"""What recurrent layers receive beside their inputs: the states of the step's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from srv.errors import InternalError


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


def no_states(group: int, index: int) -> LayerStates:
    """For steps of models without recurrent layers."""
    raise InternalError(f"layer {index} of recurrent group {group} asks for states, but the step has none")
