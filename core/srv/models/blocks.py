"""Matrices in the blocks of a GGUF file, multiplied as they are: small whole numbers, with a scale for each group.

Owns the rows of bytes, by the file's types. The arithmetic is that of two ops, `linear_gguf` and `rows_gguf`, which a
platform with the capability "gguf_blocks" brings; it may round what is multiplied to 8 bits. Must not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from srv.models.gguf_types import BLOCKS, TENSOR_TYPES
from srv.models.layers import Place, Projection, TokenEmbedding, Weights
from srv.platform.interface import OpArgs

_TYPES = {kind.name: (number, kind) for number, kind in TENSOR_TYPES.items()}


@dataclass(slots=True, eq=False)
class BlockMatrix:
    """A matrix [outputs, inputs] as a file has it. rows: uint8 [outputs, bytes of a row]; `stored`: its type."""

    rows: Tensor
    stored: str
    outputs: int
    inputs: int

    def release(self) -> None:
        """Let the bytes go: a platform has packed them."""
        self.rows = self.rows.new_empty(0, self.rows.shape[1])


def empty_matrix(place: Place, outputs: int, inputs: int, stored: str) -> BlockMatrix:
    """A matrix to be filled by a loader."""
    kind = _TYPES[stored][1]
    rows = torch.empty(outputs, inputs // kind.elements * kind.size, dtype=torch.uint8, device=place.device)
    return BlockMatrix(rows, stored, outputs, inputs)


class BlockLinear(Projection):
    """y = x Wᵀ + b, with W in blocks: one matrix for each run of parts of one type, below one another.

    bias [out] of `dtype`, the model's, or None. `shared`: the one matrix is also the embedding.
    """

    def __init__(
        self, place: Place, parts: Mapping[str, int], matrices: list[BlockMatrix], bias: bool, shared: bool = False
    ) -> None:
        super().__init__(parts)
        self.dtype, self.matrices, self.shared = place.dtype, matrices, shared
        self.bias = place.empty(sum(parts.values())) if bias else None
        self._ops: list[Callable[..., Tensor]] = [
            place.ops.bind("linear_gguf", OpArgs(place.dtype, {"inputs": each.inputs, "outputs": each.outputs}))
            for each in matrices
        ]
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on the blocks as they were loaded."""
        products = [op(x, each.rows, each.stored) for op, each in zip(self._ops, self.matrices, strict=True)]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
        return product if self.bias is None else product + self.bias

    def targets(self) -> dict[str, Tensor]:
        targets: dict[str, Tensor] = {}
        if not self.shared:
            rows = (view for each in self.matrices for view in torch.split(each.rows, self._sizes_in(each)))
            targets = {f"{name}.weight": view for name, view in zip(self.parts, rows, strict=True)}
        return targets if self.bias is None else targets | self.sliced("bias", self.bias)

    def _sizes_in(self, matrix: BlockMatrix) -> list[int]:
        """Rows of the parts that lie in one of the matrices."""
        before = sum(each.outputs for each in self.matrices[: self.matrices.index(matrix)])
        sizes: list[int] = []
        at = 0
        for size in self.parts.values():
            if before <= at < before + matrix.outputs:
                sizes.append(size)
            at += size
        return sizes


class BlockEmbedding(TokenEmbedding):
    """Rows of a matrix in blocks, made plain as they are looked up. `kernel`: int64 [T] -> [T, hidden] of `dtype`."""

    def __init__(self, place: Place, name: str, matrix: BlockMatrix) -> None:
        super().__init__(name)
        self.dtype, self.matrix = place.dtype, matrix
        self._rows: Callable[..., Tensor] = place.ops.bind("rows_gguf", OpArgs(place.dtype, {"inputs": matrix.inputs}))
        self.kernel: Callable[[Tensor], Tensor] = self.look_up

    def look_up(self, tokens: Tensor) -> Tensor:
        """The default kernel: the platform's op on the blocks as they were loaded."""
        return self._rows(self.matrix.rows, self.matrix.stored, tokens, self.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.kernel(tokens)

    def targets(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.matrix.rows}


class BlockWeights(Weights):
    """Matrices stay in the blocks of a file. `stored`: the type of each tensor, by the names of Hugging Face."""

    def __init__(self, place: Place, stored: Mapping[str, str]) -> None:
        super().__init__(place)
        self._stored = stored

    def linear(self, parts: Mapping[str, int], inputs: int, bias: bool) -> Projection:
        if not all(self._fits(name, inputs) for name in parts):
            return super().linear(parts, inputs, bias)
        runs = groupby(parts.items(), key=lambda part: self._stored[f"{part[0]}.weight"])
        matrices = [empty_matrix(self.place, sum(rows for _, rows in run), inputs, stored) for stored, run in runs]
        return BlockLinear(self.place, parts, matrices, bias)

    def embedding(self, name: str, vocab: int, hidden: int) -> TokenEmbedding:
        if not self._fits(name, hidden):
            return super().embedding(name, vocab, hidden)
        return BlockEmbedding(self.place, name, empty_matrix(self.place, vocab, hidden, self._stored[f"{name}.weight"]))

    def tied(self, name: str, embedding: TokenEmbedding) -> Projection:
        if not isinstance(embedding, BlockEmbedding):
            return super().tied(name, embedding)
        return BlockLinear(self.place, {name: embedding.matrix.outputs}, [embedding.matrix], bias=False, shared=True)

    def _fits(self, name: str, inputs: int) -> bool:
        stored = self._stored.get(f"{name}.weight", "")
        return stored in BLOCKS and inputs % _TYPES[stored][1].elements == 0
