"""Layers with weights in rows of blocks (`srv.quantization.schemes.Blocks`), which are not dequantized at load.

Blocks have the types of GGUF; other formats are converted to them. The arithmetic is that of the ops `linear_gguf`,
`linear_gguf_float32` and `rows_gguf`, which a platform with the capability "gguf_blocks" provides; the first may
quantize its input to 8 bits. Must not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.linear import WHOLE, Projection, Sharding


@dataclass(slots=True, eq=False)
class GGUFMatrix:
    """A matrix [outputs, inputs] in rows of blocks.

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
    kind = TYPES_BY_NAME[quant_type]
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
        self.implementation = context.name_of(self.op, inputs=self.inputs, outputs=matrices[0].outputs)
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on the matrices as they were loaded."""
        products = [op(x, each.rows, each.quant_type) for op, each in zip(self._ops, self.matrices, strict=True)]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
        return product if self.bias is None else product + self.bias

    def keep_float32(self, context: BuildContext) -> None:
        super().keep_float32(context)
        op = f"{self.op}_float32"
        sizes = [{"inputs": each.inputs, "outputs": each.outputs} for each in self.matrices]
        if self.float32_results and all(context.offers(op, **each) for each in sizes):
            self._ops = [context.bind(op, **each) for each in sizes]
            self.implementation = context.name_of(op, **sizes[0])

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
        kind = TYPES_BY_NAME[self.matrices[0].quant_type]  # one matrix: layers that share an input are split by outputs
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


class OrderedLinear(GGUFLinear):
    """A quantized linear layer whose inputs are taken in the order of their groups: y = x[..., columns] Wᵀ + b.

    columns: int64 [parts, inputs], one row per fused layer; they must be equal.
    """

    def __init__(
        self, context: BuildContext, output_sizes: Mapping[str, int], matrices: list[GGUFMatrix], bias: bool
    ) -> None:
        super().__init__(context, output_sizes, matrices, bias)
        self.columns = context.empty(len(output_sizes), self.inputs, dtype=torch.int64)

    @property
    def column_order(self) -> Tensor:
        return self.columns[0]

    def multiply(self, x: Tensor) -> Tensor:
        return super().multiply(x.index_select(-1, self.column_order))

    def weight_views(self) -> dict[str, Tensor]:
        orders = {f"{name}.columns": row for name, row in zip(self.output_sizes, self.columns, strict=True)}
        return super().weight_views() | orders

    def validate_loaded(self) -> str | None:
        other = (self.columns != self.columns[:1]).any(1).tolist()
        names = [name for name, differs in zip(self.output_sizes, other, strict=True) if differs]
        return f"the inputs of {names[0]} are in another order than those of the layers beside it" if names else None


class GGUFEmbedding(TokenEmbedding):
    """A quantized embedding; rows are dequantized at lookup."""

    op = "rows_gguf"

    def __init__(self, context: BuildContext, name: str, vocab: Slice, matrix: GGUFMatrix) -> None:
        super().__init__(context.dtype, name, vocab, matrix.inputs)
        self.matrix = matrix
        self._dequantize_rows = context.bind(self.op, inputs=matrix.inputs)
        self.implementation = context.name_of(self.op, inputs=matrix.inputs)
        self.kernel = self.lookup

    def lookup(self, tokens: Tensor) -> Tensor:
        """The default kernel: the platform's op on the matrix as it was loaded."""
        return self._dequantize_rows(self.matrix.rows, self.matrix.quant_type, tokens, self.dtype)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return (self.matrix.operands(),)

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.matrix.rows}
