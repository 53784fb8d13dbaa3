"""Layers that compute with the quantized matrices of a GGUF file directly, without dequantizing them at load.

Owns the rows of bytes, in the file's quantization types. The arithmetic is that of two ops, `linear_gguf` and
`rows_gguf`, which a platform with the capability "gguf_blocks" provides; the first may quantize its input to 8 bits.
Must not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from srv.models.formats.gguf_types import OP_TYPES, TENSOR_TYPES, TensorType
from srv.models.formats.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import WHOLE, Projection, Sharding, Split
from srv.quantization.method import StoredModel

_TYPES: Mapping[str, TensorType] = {each.name: each for each in TENSOR_TYPES.values()}


@dataclass(slots=True, eq=False)
class GGUFMatrix:
    """A matrix [outputs, inputs] as it is stored in the file.

    rows: uint8 [outputs, bytes per row]; `quant_type`: the name of its quantization type, e.g. "Q4_K".
    """

    rows: Tensor
    quant_type: str
    outputs: int
    inputs: int

    def operands(self) -> Mapping[str, Any]:
        return {"rows": self.rows, "quant_type": self.quant_type}


def empty_matrix(context: BuildContext, outputs: int, inputs: int, quant_type: str) -> GGUFMatrix:
    """An uninitialised matrix for a loader to fill."""
    kind = _TYPES[quant_type]
    rows = torch.empty(outputs, inputs // kind.elements * kind.size, dtype=torch.uint8, device=context.device)
    return GGUFMatrix(rows, quant_type, outputs, inputs)


class GGUFLinear(Projection):
    """y = x Wᵀ + b with quantized W; consecutive fused layers of the same quantization type form one matrix.

    bias [out] of `dtype` (the model's), or None. With `tied`, the only matrix is also that of the embedding.
    """

    op = "linear_gguf"

    def __init__(
        self,
        context: BuildContext,
        output_sizes: Mapping[str, int],
        matrices: list[GGUFMatrix],
        bias: bool,
        tied: bool = False,
        sharding: Sharding = WHOLE,
    ) -> None:
        super().__init__(context.dtype, output_sizes, matrices[0].inputs, sharding)
        self.matrices, self.tied = matrices, tied
        self._loaded_bias = context.empty(sum(output_sizes.values())) if bias else None
        self.bias = self._loaded_bias if sharding.columns is None or sharding.columns.begin == 0 else None
        self._ops: list[Callable[..., Tensor]] = [
            context.bind(self.op, inputs=each.inputs, outputs=each.outputs) for each in matrices
        ]
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on the matrices as they were loaded."""
        products = [op(x, each.rows, each.quant_type) for op, each in zip(self._ops, self.matrices, strict=True)]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
        return product if self.bias is None else product + self.bias

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(each.operands() for each in self.matrices)

    @property
    def added_bias(self) -> Tensor | None:
        return self.bias

    def weight_views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        if not self.tied:
            rows = (view for each in self.matrices for view in torch.split(each.rows, self._part_rows(each)))
            views = {f"{name}.weight": view for name, view in zip(self.output_sizes, rows, strict=True)}
        bias = self._loaded_bias
        return views if bias is None else views | self.part_views("bias", bias)

    def weight_slices(self) -> dict[str, Slice]:
        """Slices of columns are in stored bytes, as the rows are."""
        slices = super().weight_slices()
        if self.sharding.columns is None:
            return slices
        kind = _TYPES[self.matrices[0].quant_type]  # one matrix: layers that share an input are split by outputs
        return {name: each.scaled(kind.size, kind.elements) for name, each in slices.items()}

    def _part_rows(self, matrix: GGUFMatrix) -> list[int]:
        """The number of rows of each fused layer in one of the matrices."""
        first = sum(each.outputs for each in self.matrices[: self.matrices.index(matrix)])
        sizes: list[int] = []
        row = 0
        for size in self.output_sizes.values():
            if first <= row < first + matrix.outputs:
                sizes.append(size)
            row += size
        return sizes


class GGUFEmbedding(TokenEmbedding):
    """A quantized embedding; rows are dequantized at lookup."""

    op = "rows_gguf"

    def __init__(self, context: BuildContext, name: str, vocab: Slice, matrix: GGUFMatrix) -> None:
        super().__init__(context.dtype, name, vocab, matrix.inputs)
        self.matrix = matrix
        self._dequantize_rows = context.bind(self.op, inputs=matrix.inputs)
        self.kernel = self.lookup

    def lookup(self, tokens: Tensor) -> Tensor:
        """The default kernel: the platform's op on the matrix as it was loaded."""
        return self._dequantize_rows(self.matrix.rows, self.matrix.quant_type, tokens, self.dtype)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return (self.matrix.operands(),)

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.matrix.rows}


class GGUFLayerFactory(LayerFactory):
    """Layers whose matrices stay quantized, if their types allow it."""

    def __init__(self, context: BuildContext, model: StoredModel) -> None:
        super().__init__(context)
        self._quant_types = model.types

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: int = 1
    ) -> Projection:
        local = self.local_sizes(output_sizes, inputs, split, unit)
        if not all(self._stays_quantized(name, local.inputs) for name in output_sizes):
            return super().linear(output_sizes, inputs, bias, split, unit)
        runs = groupby(local.output_sizes.items(), key=lambda part: self._quant_types[f"{part[0]}.weight"])
        matrices = [
            empty_matrix(self.context, sum(rows for _, rows in run), local.inputs, quant_type)
            for quant_type, run in runs
        ]
        return GGUFLinear(self.context, local.output_sizes, matrices, bias, sharding=local.sharding)

    def embedding(self, name: str, vocab: int, hidden: int) -> TokenEmbedding:
        if not self._stays_quantized(name, hidden):
            return super().embedding(name, vocab, hidden)
        local = self.local_vocab(vocab)
        matrix = empty_matrix(self.context, local.end - local.begin, hidden, self._quant_types[f"{name}.weight"])
        return GGUFEmbedding(self.context, name, local, matrix)

    def tied_lm_head(self, name: str, embedding: TokenEmbedding) -> Projection:
        if not isinstance(embedding, GGUFEmbedding):
            return super().tied_lm_head(name, embedding)
        return GGUFLinear(self.context, {name: embedding.matrix.outputs}, [embedding.matrix], bias=False, tied=True)

    def _stays_quantized(self, name: str, inputs: int) -> bool:
        quant_type = self._quant_types.get(f"{name}.weight", "")
        return quant_type in OP_TYPES and inputs % _TYPES[quant_type].elements == 0
