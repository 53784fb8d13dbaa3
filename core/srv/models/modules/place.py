"""Where a module stands in its model, and what it is made with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from srv.dist.mesh import Axis
from srv.models import blueprint
from srv.models.blueprint import Temperature, below
from srv.models.checkpoints.slices import Slice, share
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.rope import cos_sin_table
from srv.models.layers.rope_config import RopeConfig


class PositionTables:
    """Tables with a row for each position, which layers that need the same share. `positions`: the served context."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self.positions, self._device = positions, device
        self._made: list[tuple[RopeConfig, Tensor]] = []
        self._factors: dict[Temperature, Tensor] = {}

    def query_factors(self, temperature: Temperature) -> Tensor:
        """float32 [positions, 1, 1]."""
        if temperature not in self._factors:
            numbers = torch.arange(temperature.first, self.positions + temperature.first, dtype=torch.float32)
            steps = torch.floor(numbers / temperature.step)
            factors = torch.log1p(steps) * temperature.scale + 1.0
            self._factors[temperature] = factors.view(-1, 1, 1).to(self._device)
        return self._factors[temperature]

    def rotary(self, rope: RopeConfig) -> Tensor:
        """float32 [positions, rotary_dim]."""
        for other, table in self._made:
            if other is rope or other == rope:
                return table
        made = cos_sin_table(rope, self.positions).to(self._device)
        self._made.append((rope, made))
        return made


class Place(NamedTuple):
    """`prefix`: of the names of the weights. `layer`: the number of the layer."""

    factory: LayerFactory
    tables: PositionTables
    prefix: str = ""
    layer: int = 0

    @property
    def context(self) -> BuildContext:
        return self.factory.context

    def name(self, name: str) -> str:
        """The name in checkpoints of what is called `name` here."""
        return below(self.prefix, name)

    def within(self, part: blueprint.Part) -> Place:
        """The place of what is within a part of what stands here."""
        return self._replace(prefix=below(self.prefix, part.name))

    def over(self, axis: Axis) -> Place:
        """The place of what the ranks along an axis divide."""
        return self._replace(factory=self.factory.over(axis))

    def of_layer(self, number: int) -> Place:
        """That of a layer of the stack that stands here."""
        return self._replace(prefix=self.name(f"layers.{number}"), layer=number)

    def slices(self, part: blueprint.Tensors) -> dict[str, Slice]:
        """The slices of tensors that stand here on this rank; of those that are not whole."""
        named = ((self.within(part).name(name), part.sections_of(name)) for name in part.shapes)
        found = {name: share(self.context.group, 0, sections) for name, sections in named if sections}
        return {name: each for name, each in found.items() if not each.is_whole}

    def linear(self, part: blueprint.Linear) -> Projection:
        outputs = {self.within(part).name(name): size for name, size in part.outputs.items()}
        made = self.factory.linear(outputs, part.inputs, part.bias, part.split, part.sections or part.unit)
        made.role = part.role
        return made
