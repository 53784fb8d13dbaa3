"""Layers that compute with the quantized matrices of a GGUF file directly, without dequantizing them at load.

Owns the rows of bytes, in the file's quantization types. The arithmetic is that of two ops, `linear_gguf` and
`rows_gguf`, which a platform with the capability "gguf_blocks" provides; the first may quantize its input to 8 bits.
Must not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from srv.models.formats.gguf_types import OP_TYPES, TENSOR_TYPES, TensorType
from srv.models.formats.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import WHOLE, Projection, Sharding, Split
from srv.platform.interface import OpArgs

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

    def release(self) -> None:
        """Free the bytes, after a platform has repacked them."""
        self.rows = self.rows.new_empty(0, self.rows.shape[1])


def empty_matrix(context: BuildContext, outputs: int, inputs: int, quant_type: str) -> GGUFMatrix:
    """An uninitialised matrix for a loader to fill."""
    kind = _TYPES[quant_type]
    rows = torch.empty(outputs, inputs // kind.elements * kind.size, dtype=torch.uint8, device=context.device)
    return GGUFMatrix(rows, quant_type, outputs, inputs)


class GGUFLinear(Projection):
    """y = x Wᵀ + b with quantized W; consecutive fused layers of the same quantization type form one matrix.

    bias [out] of `dtype` (the model's), or None. With `tied`, the only matrix is also that of the embedding.
    """

    def __init__(
        self,
        context: BuildContext,
        output_sizes: Mapping[str, int],
        matrices: list[GGUFMatrix],
        bias: bool,
        tied: bool = False,
        sharding: Sharding = WHOLE,
    ) -> None:
        super().__init__(output_sizes, sharding)
        self.dtype, self.matrices, self.tied = context.dtype, matrices, tied
        self._loaded_bias = context.empty(sum(output_sizes.values())) if bias else None
        self.bias = self._loaded_bias if sharding.columns is None or sharding.columns.begin == 0 else None
        self._ops: list[Callable[..., Tensor]] = [
            context.ops.bind("linear_gguf", OpArgs(context.dtype, {"inputs": each.inputs, "outputs": each.outputs}))
            for each in matrices
        ]
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on the matrices as they were loaded."""
        products = [op(x, each.rows, each.quant_type) for op, each in zip(self._ops, self.matrices, strict=True)]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
        return product if self.bias is None else product + self.bias

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
    """A quantized embedding; rows are dequantized at lookup. `kernel`: int64 [T] -> [T, hidden] of `dtype`."""

    def __init__(self, context: BuildContext, name: str, vocab: Slice, matrix: GGUFMatrix) -> None:
        super().__init__(name, vocab)
        self.dtype, self.matrix = context.dtype, matrix
        op_args = OpArgs(context.dtype, {"inputs": matrix.inputs})
        self._dequantize_rows: Callable[..., Tensor] = context.ops.bind("rows_gguf", op_args)
        self.kernel: Callable[[Tensor], Tensor] = self.lookup

    def lookup(self, tokens: Tensor) -> Tensor:
        """The default kernel: the platform's op on the matrix as it was loaded."""
        return self._dequantize_rows(self.matrix.rows, self.matrix.quant_type, tokens, self.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.kernel(tokens)

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.matrix.rows}


class GGUFLayerFactory(LayerFactory):
    """Layers whose matrices stay quantized. `quant_types`: the type of each tensor, by its Hugging Face name."""

    def __init__(self, context: BuildContext, quant_types: Mapping[str, str]) -> None:
        super().__init__(context)
        self._quant_types = quant_types

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
