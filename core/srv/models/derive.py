"""What follows from the blueprint of a model, before it is built: each is one walk over the tree. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from srv.models.blueprint import Attention, Embedding, Linear, OpUse, Output, Part, Stack, below, walk
from srv.specs import AttentionLayer


class Matrix(NamedTuple):
    """A weight matrix of one layer. `names`: the layers of the checkpoint that it fuses. `embedding`: its rows are
    looked up. `tied`: the output layer, with the matrix of the embedding. `role`: as `OpLayer.role`. `bias`: of a layer
    with a role, whether it adds one. `parts`: the outputs of each of `names`; () if they are equal."""

    names: tuple[str, ...]
    inputs: int
    outputs: int
    embedding: bool = False
    tied: bool = False
    role: str = ""
    bias: bool = False
    parts: tuple[int, ...] = ()

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """The outputs of each of `names`."""
        return self.parts or (self.outputs // len(self.names),) * len(self.names)


class ExpertMatrices(NamedTuple):
    """The experts of one layer. `prefix`: of the names of all. `sizes`: by which ops of experts are selected.

    `bias`: whether their projections have biases.
    """

    prefix: str
    sizes: Mapping[str, int]
    bias: bool = False


class ModelOps(NamedTuple):
    """Everything that a model's layers call, each distinct use of an op once; the matrices of all layers."""

    ops: tuple[OpUse, ...]
    matrices: tuple[Matrix, ...]
    experts: tuple[ExpertMatrices, ...] = ()


def parameters(tree: Part) -> int:
    """How many there are."""
    return sum(weight.elements for _, part in walk(tree) for weight in part.weights())


def projection_parameters(tree: Part) -> int:
    """The weights of linear layers, without those of heads, and without biases."""
    linear = (part for _, part in walk(tree) if isinstance(part, Linear) and not isinstance(part, Output))
    return sum(part.inputs * sum(part.outputs.values()) for part in linear)


def attention_layers(tree: Part) -> tuple[AttentionLayer, ...]:
    """The attention of each layer, with the number of the layer."""
    stack = next(part for _, part in walk(tree) if isinstance(part, Stack))
    numbered = ((index, part) for index, layer in enumerate(stack.layers) for _, part in walk(layer))
    return tuple(part.layer(index) for index, part in numbered if isinstance(part, Attention))


def ops(tree: Part) -> tuple[OpUse, ...]:
    """What layers call beside the products with matrices, each distinct use once."""
    used = (use for _, part in walk(tree) for use in part.ops())
    return tuple({(use.op, use.dtype, tuple(use.sizes.items())): use for use in used}.values())


def matrices(tree: Part) -> Iterator[Matrix]:
    """All of them, by the names that layers have for them."""
    for name, part in walk(tree):
        if isinstance(part, Embedding):
            yield Matrix((name,), part.size, part.rows, embedding=True)
        elif isinstance(part, Linear):
            names, outputs = (below(name, each) for each in part.outputs), tuple(part.outputs.values())
            yield Matrix(tuple(names), part.inputs, sum(outputs), parts=outputs if len(outputs) > 1 else ())


def model_ops(tree: Part) -> ModelOps:
    """Everything that the layers of a model call."""
    return ModelOps(ops(tree), tuple(matrices(tree)))
