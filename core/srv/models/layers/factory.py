"""The factory of layers with weight matrices: architectures must not know how a checkpoint stores its weights.

Also owns how matrices are divided among ranks: architectures give the sizes of the whole model and the axis to split.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self, TypeAlias

from srv.dist.mesh import Axis
from srv.models.checkpoints.slices import Section, Sections, Slice, share
from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import Embedding, TokenEmbedding
from srv.models.layers.experts import Experts, ExpertSizes, ExpertWeights
from srv.models.layers.linear import WHOLE, Linear, Projection, Sharding, Split

Unit: TypeAlias = int | tuple[Sections, ...]


class LocalSizes(NamedTuple):
    """The sizes of a linear layer on this rank, and the part of the checkpoint's layers that it is."""

    output_sizes: Mapping[str, int]
    inputs: int
    sharding: Sharding = WHOLE

    @property
    def outputs(self) -> int:
        return sum(self.output_sizes.values())


def sections_of(sizes: Sequence[int], unit: Unit) -> tuple[Sections, ...]:
    """Those of each size. `unit`: as in `LayerFactory.linear`."""
    return tuple((Section(size, unit),) for size in sizes) if isinstance(unit, int) else unit


class LayerFactory:
    """Makes linear layers and embeddings with unquantized weights of the model's dtype, for a loader to fill.

    Subclasses make the layers of quantized checkpoints. All sizes are those of the whole layers; the layers that are
    made hold this rank's part.
    """

    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def over(self, axis: Axis) -> Self:
        """The factory of layers that the ranks along an axis divide."""
        factory = copy.copy(self)
        factory.context = self.context.over(axis)
        return factory

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: Unit = 1
    ) -> Projection:
        """One linear layer that fuses several of the checkpoint; `output_sizes`: the outputs of each, by name.

        `split`: the axis that is divided among the ranks, None for a copy on each, and "sum" for a copy on each whose
        inputs are partial sums. Outputs, or inputs, are divided in units of `unit` (heads); units are copied where
        there are fewer than ranks. In place of one unit, it may be the sections of each output, or of the inputs: the
        checkpoint has them one after the other in one matrix, and each is divided by itself.
        """
        local = self.local_sizes(output_sizes, inputs, split, unit)
        return Linear(self.context, local.output_sizes, local.inputs, bias, sharding=local.sharding)

    def local_sizes(self, output_sizes: Mapping[str, int], inputs: int, split: Split | None, unit: Unit) -> LocalSizes:
        group = self.context.group
        if split is None or group.size == 1:
            return LocalSizes(output_sizes, inputs)
        first = group.rank == 0
        if split == "sum":
            return LocalSizes(output_sizes, inputs, Sharding(adds_bias=first))
        if split == "in":
            (sections,) = sections_of((inputs,), unit)
            columns = share(group, 1, sections)
            return LocalSizes(output_sizes, columns.size, Sharding(columns=columns, adds_bias=first))
        each = zip(output_sizes, sections_of(tuple(output_sizes.values()), unit), strict=True)
        rows = {name: share(group, 0, sections) for name, sections in each}
        return LocalSizes({name: part.size for name, part in rows.items()}, inputs, Sharding(rows))

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        """All experts of one layer, named `{prefix}.{expert}.gate_proj`, `up_proj` and `down_proj`.

        A rank has some of them, or slices of each by its intermediate size: results are then partial sums.
        """
        return Experts(self.context, prefix, self.local_experts(sizes), bias)

    def local_experts(self, sizes: ExpertSizes) -> ExpertSizes:
        """The sizes on this rank."""
        share = Slice(0, *self.context.over("slices").group.share(sizes.intermediate), sizes.intermediate)
        first, end = self.context.over("experts").group.share(sizes.experts)
        elsewhere = tuple(expert for expert in range(sizes.experts) if not first <= expert < end)
        return sizes._replace(experts=end - first, offset=first, elsewhere=elsewhere, share=share)

    def embedding(self, name: str, vocab: int, hidden: int) -> TokenEmbedding:
        """The embeddings of this rank's share of the vocabulary."""
        return Embedding(self.context, name, self.local_vocab(vocab), hidden)

    def local_vocab(self, vocab: int) -> Slice:
        return Slice(0, *self.context.group.share(vocab), vocab)

    def tied_lm_head(self, name: str, embedding: TokenEmbedding) -> Projection:
        """The output layer of a model with tied embeddings: it shares the embedding's weight."""
        if not isinstance(embedding, Embedding):
            raise TypeError(f"{type(embedding).__name__} has no unquantized weight that the output layer could share")
        vocab, hidden = embedding.weight.shape
        return Linear(self.context, {name: vocab}, hidden, bias=False, weight=embedding.weight)
