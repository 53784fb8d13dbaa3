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

from srv.errors import ModelError
from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import WHOLE, Projection, Sharding, Split
from srv.models.layers.moe_config import expert_names
from srv.quantization.gguf import stays_quantized
from srv.quantization.gguf_experts import GGUFExperts
from srv.quantization.method import StoredModel


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

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        """Raises ModelError for experts of which some matrices stay quantized and others do not, or not as one type."""
        local = self.local_experts(sizes)
        gate_up, down = expert_names(prefix, sizes.experts)
        types = [{self._quant_types.get(f"{name}.weight", "") for name in names} for names in (gate_up, down)]
        kept = [self._stays_quantized(name, local.hidden) for name in gate_up]
        kept += [self._stays_quantized(name, local.local) for name in down]
        if not any(kept):
            return super().experts(prefix, sizes, bias)
        if not all(kept) or any(len(each) > 1 for each in types):
            stored = " and ".join(sorted({each or "an unknown type" for every in types for each in every}))
            raise ModelError(
                "unsupported_quantization",
                prefix,
                f"its experts are stored as {stored}, but they stay quantized only if gate and up are of one type, "
                "and down is of one type",
                "Set --dequantize-weights, or use another GGUF file",
            )
        return GGUFExperts(self.context, prefix, local, types[0].pop(), types[1].pop(), bias)

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
        return stays_quantized(self._quant_types, name, inputs)
