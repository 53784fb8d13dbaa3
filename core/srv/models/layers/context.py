"""The context in which layers are built: the device, the dtype, the platform's ops, and the ranks that share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from srv.dist.group import RankGroup
from srv.dist.mesh import Axis
from srv.platform.interface import Communicator, OpArgs
from srv.platform.ops import Ops

_ONE_RANK = RankGroup()
_OF_TENSORS: tuple[Axis, ...] = ("tensor", "heads", "slices", "vocabulary", "embedding")


class JoinedGroup(NamedTuple):
    """A group of ranks that have met. `communicator`: their collective operations; None for one rank."""

    group: RankGroup
    communicator: Communicator | None


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The device and dtype that layers are built for, and the ops that they call.

    `group`: the ranks over which layers are sharded. `communicator`: its collective operations; None for one rank.
    `groups`: those along each axis of a mesh; without, one group divides every layer, and holds all of its experts.
    `cache_places`: for each layer, its cache group and its index there, as `srv.specs.cache_places` gives them; if
    empty, all layers are in one group. `state_places`: the same of recurrent cache groups, which are counted apart.
    `layer_made(index, layer)`: called with each layer of a stack, before the next one is made.
    """

    device: torch.device
    dtype: torch.dtype
    ops: Ops
    group: RankGroup = _ONE_RANK
    communicator: Communicator | None = None
    cache_places: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    state_places: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    layer_made: Callable[[int, nn.Module], None] = lambda index, layer: None
    groups: Mapping[Axis, JoinedGroup] = field(default_factory=dict)

    def over(self, axis: Axis) -> BuildContext:
        """The context of layers that the ranks along an axis divide."""
        if axis in self.groups:
            group, communicator = self.groups[axis]
        elif axis in _OF_TENSORS:
            return self
        else:
            group, communicator = _ONE_RANK, None
        return replace(self, group=group, communicator=communicator)

    def cache_place(self, layer: int) -> tuple[int, int]:
        """The cache group of a layer, and its index there."""
        return self.cache_places[layer] if self.cache_places else (0, layer)

    def state_place(self, layer: int) -> tuple[int, int]:
        """The recurrent cache group of a layer, and its index there."""
        return self.state_places[layer] if self.state_places else (0, layer)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter for a loader to fill; `dtype` defaults to the model's."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=dtype or self.dtype), requires_grad=False)

    def bind(self, op: str, **sizes: int) -> Callable[..., Tensor]:
        """The platform's implementation of an op for the model's dtype and these sizes."""
        return self.ops.bind(op, OpArgs(self.dtype, sizes))

    def name_of(self, op: str, **sizes: int) -> str:
        """The name of the implementation that `bind` returns; "" if there is none."""
        return self.ops.name_of(op, OpArgs(self.dtype, sizes))

    def offers(self, op: str, **sizes: int) -> bool:
        """Whether the platform has an implementation that `bind` would find."""
        return self.ops.offers(op, OpArgs(self.dtype, sizes))
