"""Layers with weights in rows of blocks (`srv.quantization.schemes.Blocks`), which are not dequantized at load.

Blocks have the types of GGUF; other formats are converted to them. The arithmetic is that of the ops `linear_gguf` and
`rows_gguf`, which a platform with the capability "gguf_blocks" provides, and of `linear_gguf_float32` and
`experts_gguf`, which it may provide; products may quantize their input to 8 bits. Must not know files, nor how
checkpoints state the order of inputs.
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
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.linear import WHOLE, Projection, Sharding
from srv.models.layers.moe_config import DOWN, GATE, UP
from srv.models.layers.op_layer import OpLayer

_INDEX_BYTES = 64 << 20  # of the columns of as many tokens as are gathered at a time
_ORDER = "columns"  # the suffix of the tensors that a loader fills with orders


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
        self.bias = self._loaded_bias if sharding.adds_bias else None
        self._ops: list[Callable[..., Tensor]] = [
            context.bind(self.op, inputs=matrix.inputs, outputs=matrix.outputs) for matrix in matrices
        ]
        self.implementation = context.name_of(self.op, inputs=self.inputs, outputs=matrices[0].outputs)
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on the matrices as they were loaded."""
        products = [op(x, matrix.rows, matrix.quant_type) for op, matrix in zip(self._ops, self.matrices, strict=True)]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
        return product if self.bias is None else product + self.bias

    def keep_float32(self, context: BuildContext) -> None:
        super().keep_float32(context)
        op = f"{self.op}_float32"
        sizes = [{"inputs": matrix.inputs, "outputs": matrix.outputs} for matrix in self.matrices]
        if self.float32_results and all(context.offers(op, **size) for size in sizes):
            self._ops = [context.bind(op, **size) for size in sizes]
            self.implementation = context.name_of(op, **sizes[0])

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(matrix.operands() for matrix in self.matrices)

    @property
    def added_bias(self) -> Tensor | None:
        return self.bias

    def weight_views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        if not self.tied:
            rows = (view for matrix in self.matrices for view in torch.split(matrix.rows, self._part_rows(matrix)))
            views = {f"{name}.weight": view for name, view in zip(self.output_sizes, rows, strict=True)}
        bias = self._loaded_bias
        return views if bias is None else views | self.part_views("bias", bias)

    def weight_slices(self) -> dict[str, Slice]:
        """Slices of columns are in stored bytes, as the rows are."""
        slices = super().weight_slices()
        if self.sharding.columns is None:
            return slices
        kind = TYPES_BY_NAME[self.matrices[0].quant_type]  # one matrix: layers that share an input are split by outputs
        return {name: view_slice.scaled(kind.size, kind.elements) for name, view_slice in slices.items()}

    def _part_rows(self, matrix: GGUFMatrix) -> list[int]:
        """The number of rows of each fused layer in one of the matrices."""
        first = sum(previous.outputs for previous in self.matrices[: self.matrices.index(matrix)])
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
        self,
        context: BuildContext,
        output_sizes: Mapping[str, int],
        matrices: list[GGUFMatrix],
        bias: bool,
        sharding: Sharding = WHOLE,
    ) -> None:
        super().__init__(context, output_sizes, matrices, bias, sharding=sharding)
        self.columns = context.empty(len(output_sizes), self.inputs, dtype=torch.int64)

    @property
    def column_order(self) -> Tensor:
        return self.columns[0]

    def multiply(self, x: Tensor) -> Tensor:
        return super().multiply(x.index_select(-1, self.column_order))

    def weight_views(self) -> dict[str, Tensor]:
        orders = {f"{name}.columns": row for name, row in zip(self.output_sizes, self.columns, strict=True)}
        return super().weight_views() | orders

    def weight_slices(self) -> dict[str, Slice]:
        """Each rank has the whole order of the inputs."""
        return {name: part for name, part in super().weight_slices().items() if not name.endswith(f".{_ORDER}")}

    def validate_loaded(self) -> str | None:
        other = (self.columns != self.columns[:1]).any(1).tolist()
        names = [name for name, differs in zip(self.output_sizes, other, strict=True) if differs]
        return f"the inputs of {names[0]} are in another order than those of the layers beside it" if names else None


class GatheredLinear(Projection):
    """As `OrderedLinear` with columns that ranks divide: those that follow one another in the order of groups, whose
    inputs may be on any rank.

    columns: int64 [inputs of this rank]: which of all inputs its matrix takes. `inner`: the product with these.
    """

    op = ""
    delegates = True

    def __init__(self, context: BuildContext, inner: GGUFLinear) -> None:
        super().__init__(context.dtype, inner.output_sizes, inner.inputs, inner.sharding)
        assert context.communicator is not None
        self.inner, self._communicator, self.implementation = inner, context.communicator, inner.implementation
        self.columns = context.empty(inner.inputs, dtype=torch.int64)
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        gathered = self._communicator.all_gather(x)  # [ranks, T, inputs of one rank]
        return self.inner.kernel(gathered.transpose(0, 1).flatten(1).index_select(1, self.columns))

    def weight_views(self) -> dict[str, Tensor]:
        return self.inner.weight_views() | {f"{self._name}.{_ORDER}": self.columns}

    def weight_slices(self) -> dict[str, Slice]:
        columns = self.sharding.columns
        assert columns is not None
        return self.inner.weight_slices() | {f"{self._name}.{_ORDER}": columns._replace(axis=0)}

    @property
    def _name(self) -> str:
        (name,) = self.output_sizes
        return name


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


class GGUFExperts(ExpertWeights):
    """gate_up uint8 [E, 2 I, bytes per row], and down uint8 [E, H, bytes per row], each of one quantization type.

    With biases gate_up_bias [E, 2 I] and down_bias [E, H] of `dtype`, or without; of several ranks, only the first adds
    the biases of down_proj.
    """

    op = "experts_gguf"

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        sizes: ExpertSizes,
        gate_up_type: str,
        down_type: str,
        bias: bool = False,
    ) -> None:
        super().__init__(context, prefix, sizes)
        self.gate_up_type, self.down_type = gate_up_type, down_type
        self.gate_up = self._empty(context, sizes.first_rows, sizes.hidden, gate_up_type)
        self.down = self._empty(context, sizes.hidden, sizes.local, down_type)
        self.gate_up_bias = context.empty(sizes.experts, sizes.first_rows) if bias else None
        self._loaded_down_bias = context.empty(sizes.experts, sizes.hidden) if bias else None
        self.down_bias = self._loaded_down_bias if sizes.adds_biases else None

    def _empty(self, context: BuildContext, rows: int, columns: int, quant_type: str) -> Tensor:
        kind = TYPES_BY_NAME[quant_type]
        shape = self.sizes.experts, rows, columns // kind.elements * kind.size
        return torch.empty(shape, dtype=torch.uint8, device=context.device)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._compute(x, ids, weights, *self.operands()[0].values())

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        matrices = {name: getattr(self, name) for name in ("gate_up", "gate_up_type", "down", "down_type")}
        biases = {name: getattr(self, name) for name in ("gate_up_bias", "down_bias")}
        return ({**matrices, "activation": self.sizes.activation, **biases},)

    def weight_views(self) -> dict[str, Tensor]:
        views = self.matrix_views("weight", self.gate_up, self.down)
        if self.gate_up_bias is not None and self._loaded_down_bias is not None:
            views |= self.matrix_views("bias", self.gate_up_bias, self._loaded_down_bias)
        return views

    def weight_slices(self) -> dict[str, Slice]:
        """Slices of columns are in stored bytes, as the rows are."""
        kind = TYPES_BY_NAME[self.down_type]
        slices = self.row_slices("weight") | self.column_slices("weight", kind.size, kind.elements)
        return slices if self.gate_up_bias is None else slices | self.row_slices("bias")


class OrderedExperts(ExpertWeights):
    """Experts whose matrices have inputs in the order of their groups (GPTQ's desc_act), not of the hidden size.

        x ── for each of a token's experts: the columns in the order of its gate and up projection ── experts ── sum

    The order of a down projection becomes that of the rows of the gate and the up projection before it, so that no op
    has to know of it.

    `inner`: the experts on matrices whose columns are in order, which a platform may give another kernel.

    gate_up_columns int64 [E, 2, H]: those of the gate and of the up projection, which must be equal, or [E, 1, H]
    without a gate; down_columns int64 [E, I].
    """

    op = ""
    delegates = True

    def __init__(self, context: BuildContext, inner: GGUFExperts) -> None:
        OpLayer.__init__(self)  # it has no op of its own to bind
        self.inner, self.prefix, self.sizes = inner, inner.prefix, inner.sizes
        self.dtype, self.inputs, self.implementation = inner.dtype, inner.inputs, inner.implementation
        experts, hidden, inter = self.sizes.experts, self.sizes.hidden, self.sizes.intermediate
        self.gate_up_columns = context.empty(experts, len(self.sizes.first), hidden, dtype=torch.int64)
        self.down_columns = context.empty(experts, inter, dtype=torch.int64)
        self._shared = False  # whether all experts have the same order of inputs; known when it is loaded
        self.kernel = self.compute

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        columns = self.gate_up_columns[:, 0]
        if self._shared:
            return self.inner.kernel(x.index_select(-1, columns[0]), ids, weights)
        (tokens, chosen), hidden = ids.shape, self.sizes.hidden
        rows = x.new_empty(tokens, chosen, hidden)
        at_once = max(_INDEX_BYTES // (chosen * hidden * columns.itemsize), 1)
        for begin in range(0, tokens, at_once):
            part = slice(begin, begin + at_once)
            order = columns[ids[part].clamp(0, self.sizes.experts - 1)]
            torch.gather(x[part].unsqueeze(1).expand(order.shape), 2, order, out=rows[part])
        out = self.inner.kernel(rows.flatten(0, 1), ids.reshape(-1, 1), weights.reshape(-1, 1))
        return out.view(rows.shape).sum(1)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return ()

    def weight_matrices(self) -> tuple[Tensor, ...]:
        return ()

    def weight_views(self) -> dict[str, Tensor]:
        views = self.inner.weight_views()
        columns = zip(self.sizes.numbers, self.gate_up_columns, self.down_columns, strict=True)
        for expert, gate_up, down in columns:
            for name, order in zip((*self.sizes.first, DOWN), (*gate_up, down), strict=True):
                views[f"{self.prefix}.{expert}.{name}.{_ORDER}"] = order
        return views

    def weight_slices(self) -> dict[str, Slice]:
        return self.inner.weight_slices()

    def validate_loaded(self) -> str | None:
        """As the base class; then puts the rows of gate and up projection in the order of the down projection."""
        first, *others = self.gate_up_columns.unbind(1)  # the gate and `up`, or `up` alone
        different = [expert for up in others for expert in (first != up).any(1).nonzero().flatten().tolist()]
        if different:
            name = f"{self.prefix}.{different[0]}"
            return f"the inputs of {name}.{GATE} are in another order than those of {name}.{UP}, which are the same"
        self._shared = bool((first == first[:1]).all())
        for fused in (self.inner.gate_up, self.inner.gate_up_bias):
            for order, rows in zip(self.down_columns, () if fused is None else fused, strict=fused is not None):
                for part in rows.chunk(len(self.sizes.first)):
                    part.copy_(part[order.to(part.device)])  # layers may be in host memory
        return self.inner.validate_loaded()
