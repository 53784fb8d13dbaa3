"""What a model is made of, as data: weights with names and shapes, and what each layer keeps per token or request.

A family, a function that `srv.models.sizes.registry` lists, adds parts up to its model. This module must not know any
family, nor how weights are quantized: `srv.models.sizes.stored` derives bytes from names, kinds and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from srv.models.derive import grouped, of_layer
from srv.specs import CacheSpec

MAX_LAYERS = 10_000  # so that a damaged file cannot cause huge allocations

Kind = Literal["plain", "linear", "expert"]


class UnknownSizes(Exception):
    """No size is claimed for a model. The message is a clause with the reason."""


class Weight(NamedTuple):
    """The weight of one module, or one vector of parameters.

    `name`: the module's in checkpoints; that of a vector ends in its own name ("bias"). `shape`: of a "linear" or
    "expert" weight ``[outputs, inputs]``. `kind`: only "linear" and "expert" weights are quantized. `copies`: how many
    experts have such a weight, of which a token uses `used`.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = "plain"
    copies: int = 1
    used: int = 1

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.copies


@dataclass(frozen=True)
class Part:
    """Weights, and the caches of the layer that they belong to; a model is a sum of parts.

    `caches`: templates whose `layers` are empty; `stack` gives them their layer.
    """

    weights: tuple[Weight, ...] = ()
    caches: tuple[CacheSpec, ...] = field(default=())

    def __add__(self, other: Part) -> Part:
        return Part(self.weights + other.weights, self.caches + other.caches)

    def under(self, name: str) -> Part:
        """The part as a submodule `name`."""
        return Part(tuple(each._replace(name=f"{name}.{each.name}") for each in self.weights), self.caches)

    @property
    def parameters(self) -> int:
        """As in the files of a checkpoint: with what transformers stores in buffers, as the biases of routers."""
        return sum(weight.elements for weight in self.weights)

    @property
    def active_parameters(self) -> int:
        """Those that take part in computing one token: of each layer's experts, the chosen ones."""
        return sum(weight.elements // weight.copies * weight.used for weight in self.weights)


NOTHING = Part()


def linear(name: str, inputs: int, outputs: int, bias: object = False) -> Part:
    """A linear layer. `bias`: a truth value of the configuration."""
    weight = Weight(name, (outputs, inputs), "linear")
    return Part((weight, Weight(f"{name}.bias", (outputs,))) if bias else (weight,))


def plain(name: str, *shape: int) -> Part:
    """What is never quantized: an embedding, a router and its bias, a convolution."""
    return Part((Weight(name, shape),))


def norm(name: str, size: int, bias: object = False) -> Part:
    """A norm with a weight; layer norms have a bias as well."""
    return plain(name, size) + (plain(f"{name}.bias", size) if bias else NOTHING)


def norms(size: int, *names: str, bias: object = False) -> Part:
    """Several norms of one size."""
    return total(norm(name, size, bias) for name in names)


def total(parts: Iterator[Part]) -> Part:
    """The sum of parts; adding them one by one would copy long tuples."""
    every = list(parts)
    weights = tuple(weight for part in every for weight in part.weights)
    return Part(weights, tuple(cache for part in every for cache in part.caches))


def stack(name: str, count: int, layer: Callable[[int], Part]) -> Part:
    """`count` layers under `name`. Their caches get the numbers of their layers."""
    if not isinstance(count, int) or not 0 <= count <= MAX_LAYERS:
        raise UnknownSizes(f"{count!r} is not a number of layers")
    return total(_numbered(layer(index), index).under(f"{name}.{index}") for index in range(count))


def _numbered(part: Part, index: int) -> Part:
    return Part(part.weights, tuple(of_layer(cache, index) for cache in part.caches))


def cache_groups(part: Part, context_length: int) -> tuple[CacheSpec, ...]:
    """The cache groups of a model (`srv.models.derive.grouped`)."""
    return grouped(part.caches, context_length)
