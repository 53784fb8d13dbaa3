"""Makes layers of the matrices that a quantized checkpoint has: those that it fuses stay whole.

Quantized weights are not divided into the layers of the model: their packed words, scales and orders of inputs belong
to the fused matrix. `srv.models.checkpoints.rule_storage` permutes its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from srv.dist.mesh import Axis
from srv.models.checkpoints.rules import WeightMapping
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory, Unit, sections_of
from srv.models.layers.linear import Projection, Split


class FusedLayerFactory(LayerFactory):
    """`inner`: the factory of the method of the weights, which is asked for layers by the names of fused matrices."""

    def __init__(self, inner: LayerFactory, mapping: WeightMapping) -> None:
        super().__init__(inner.context)
        self._inner, self._mapping = inner, mapping

    def over(self, axis: Axis) -> Self:
        factory = super().over(axis)
        factory._inner = self._inner.over(axis)
        return factory

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: Unit = 1
    ) -> Projection:
        names = self._mapping.fused(tuple(output_sizes))
        if names == tuple(output_sizes):
            return self._inner.linear(output_sizes, inputs, bias, split, unit)
        (name,) = names
        if split == "out":
            sections = sections_of(tuple(output_sizes.values()), unit)
            unit = (tuple(section for each in sections for section in each),)
        return self._inner.linear({name: sum(output_sizes.values())}, inputs, bias, split, unit)

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        return self._inner.experts(prefix, sizes, bias)

    def embedding(self, name: str, vocab: int, hidden: int) -> TokenEmbedding:
        return self._inner.embedding(name, vocab, hidden)

    def tied_lm_head(self, name: str, embedding: TokenEmbedding) -> Projection:
        return self._inner.tied_lm_head(name, embedding)
