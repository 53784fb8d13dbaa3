"""What one matrix of a layer is held as: its tensors, hence its bytes, and the op that multiplies by it. Torch-free.

    scheme   tensors of a matrix [N, K]                                          op
    Int8     weight int8 [N, K], a float32 per output                            linear_int8, linear_w8a8, ..._static
    Fp8      weight float8_e4m3fn [N, K], a float32 per block of outputs, inputs linear_fp8
    Blocks   rows of GGUF's blocks, or of alike ones, which contain their scales linear_gguf, rows_gguf

`srv.quantization.layers` makes the layers of each. Must not know how checkpoints store them, nor methods by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from srv.dtypes import STORED_SIZES, item_size
from srv.models.checkpoints.gguf_types import TYPES_BY_NAME

BIASES = "experts with biases cannot be int8"
SCALE = "weight_scale"  # the suffix of the scales of weights

# Sixteenths of a byte per weight that any platform's packing takes at most: it may widen scales, to 16 bits or float32,
# and indices of codebooks. Types that are not listed, of 5 or 6 bits, may be unpacked to bytes.
_PREPARED: Mapping[str, int] = {
    **{"Q2_K": 13, "Q3_K": 11, "Q4_0": 9, "Q4_1": 10, "Q4_K": 11, "Q8_0": 17},
    **{"IQ4_NL": 12, "IQ4_XS": 12, "MXFP4": 10, "NF4": 9, "FP4": 9},
    **{"TQ1_0": 6, "TQ2_0": 6, "IQ1_S": 9, "IQ1_M": 10},
    **{"IQ2_XXS": 9, "IQ2_XS": 10, "IQ2_S": 10, "IQ3_XXS": 11, "IQ3_S": 11},
}
_UNPACKED = 18


class Matrix(NamedTuple):
    """A matrix of a layer: of linear layers that share one input, or the same projections of all experts of a layer.

    `names`, `outputs`: of each of these. `inputs`: of all of them.
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    experts: bool = False


class Units(NamedTuple):
    """A matrix is divided among ranks at multiples of so many outputs, or inputs."""

    outputs: int = 1
    inputs: int = 1


class HeldTensor(NamedTuple):
    """A tensor that a layer holds. `resident`: it stays on the device where the matrix is in host memory."""

    suffix: str
    shape: tuple[int, ...]
    dtype: str
    resident: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * (STORED_SIZES.get(self.dtype) or item_size(self.dtype))


class Scheme(ABC):
    """The base class of all schemes, of those of other distributions as well; objects are hashable and do not change.

    `rows_op`: the contract that an embedding calls; "" if none holds its rows so.
    """

    rows_op: ClassVar[str] = ""

    @property
    @abstractmethod
    def op(self) -> str:
        """The contract that linear layers call."""

    @property
    def has_biases(self) -> bool:
        """Whether the bias of a linear layer is a tensor of its own."""
        return True

    @property
    def units(self) -> Units | str:
        """What stays together on a rank of several; a clause if layers of this scheme cannot be sharded."""
        return "weights of this scheme cannot be sharded yet"

    @property
    def expert_units(self) -> Units | str:
        """Likewise, of experts."""
        return self.units

    @abstractmethod
    def tensors(self, matrix: Matrix) -> tuple[HeldTensor, ...]:
        """Those of a matrix, without biases. First those of `OpLayer.weight_tensors`, in their order."""

    def bytes(self, matrix: Matrix) -> int:
        """Exactly those of the loaded tensors of a matrix."""
        return sum(tensor.bytes for tensor in self.tensors(matrix))

    def prepared_bytes(self, matrix: Matrix) -> int:
        """The most that they take after a platform has repacked them."""
        return self.bytes(matrix)


# (names of layers that share one input, or of projections of experts; their inputs; whether it is an embedding) -> the
# scheme of their matrix, None for unquantized weights
LayerSchemes: TypeAlias = Callable[[tuple[str, ...], int, bool], Scheme | None]

Inputs: TypeAlias = Literal["dynamic", "static", "none"]
_INT8_OPS: Mapping[Inputs, str] = {
    "dynamic": "linear_w8a8",
    "static": "linear_w8a8_static",
    "none": "linear_int8",
}


@dataclass(frozen=True)
class Int8(Scheme):
    """Symmetric int8 with a scale per output. `inputs`: how inputs are quantized: with a scale per token, with one that
    the checkpoint states, or not. `offsets`: the checkpoint stores zero points, all of which must be 0. `bias_inside`:
    that of a layer with static inputs is part of the integers which are added to its sums."""

    inputs: Inputs = "dynamic"
    offsets: bool = False
    bias_inside: bool = False

    @property
    def op(self) -> str:
        return _INT8_OPS[self.inputs]

    @property
    def units(self) -> Units:
        return Units()

    @property
    def has_biases(self) -> bool:
        return not self.bias_inside

    def tensors(self, matrix: Matrix) -> tuple[HeldTensor, ...]:
        outputs = sum(matrix.outputs)
        weight = HeldTensor("weight", (outputs, matrix.inputs), "int8")
        if self.inputs != "static":
            offset = (HeldTensor("weight_offset", (outputs,), "float32", resident=True),) if self.offsets else ()
            return weight, HeldTensor(SCALE, (outputs,), "float32"), *offset
        parts = (len(matrix.names),)
        return (
            weight,
            HeldTensor("deq_scale", (outputs,), "float32"),
            HeldTensor("quant_bias", (outputs,), "int32", resident=True),
            HeldTensor("input_scale", parts, "float32", resident=True),
            HeldTensor("input_offset", parts, "float32", resident=True),
        )


@dataclass(frozen=True)
class Fp8(Scheme):
    """float8_e4m3fn with float32 scales. `block`: (outputs, inputs) that share one; None: each output has its own."""

    block: tuple[int, int] | None = None

    @property
    def op(self) -> str:
        return "linear_fp8"

    @property
    def units(self) -> Units:
        return Units() if self.block is None else Units(*self.block)

    def block_of(self, inputs: int) -> tuple[int, int]:
        """(outputs, inputs) that share a scale, of a matrix with so many inputs."""
        return self.block or (1, inputs)

    def scale_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        rows, columns = self.block_of(inputs)
        return -(-outputs // rows), -(-inputs // columns)

    def runs(self, output_sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """The layers that one matrix holds: fused ones, divided after each that does not end with a whole block."""
        run: dict[str, int] = {}
        shared = 1 if self.block is None else self.block[0]
        for name, outputs in output_sizes.items():
            run[name] = outputs
            if outputs % shared:
                yield run
                run = {}
        if run:
            yield run

    def tensors(self, matrix: Matrix) -> tuple[HeldTensor, ...]:
        """A weight and its scales of each run of fused layers; those of experts are one."""
        sizes = dict(zip(matrix.names, matrix.outputs, strict=True))
        tensors: list[HeldTensor] = []
        for run in [sizes] if matrix.experts else self.runs(sizes):
            shapes = [self.scale_shape(outputs, matrix.inputs) for outputs in run.values()]
            tensors.append(HeldTensor("weight", (sum(run.values()), matrix.inputs), "float8_e4m3fn"))
            tensors.append(HeldTensor(SCALE, (sum(rows for rows, _ in shapes), shapes[0][1]), "float32"))
        return tuple(tensors)


@dataclass(frozen=True)
class Blocks(Scheme):
    """Rows of blocks. `types`: their GGUF type, one for each of the names of a matrix, or one for all of them.

    `ordered`: inputs are taken in an order that the checkpoint states (GPTQ's desc_act).
    """

    types: tuple[str, ...]
    ordered: bool = False
    rows_op: ClassVar[str] = "rows_gguf"

    @property
    def op(self) -> str:
        return "linear_gguf"

    @property
    def units(self) -> Units:
        return Units(inputs=math.lcm(*(TYPES_BY_NAME[kind].elements for kind in self.types)))

    @property
    def expert_units(self) -> Units | str:
        """The order of a down projection is that of the rows of all inner units before it."""
        if self.ordered:
            return "experts whose inputs have an order of their own (desc_act) cannot be divided as they are"
        return self.units

    @property
    def type(self) -> str:
        """The one type of a matrix whose parts do not differ."""
        return self.types[0]

    def runs(self, outputs: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """(type, outputs) of each matrix: consecutive layers of one type are one."""
        types = self.types * len(outputs) if len(self.types) == 1 else self.types
        grouped = groupby(zip(types, outputs, strict=True), key=lambda part: part[0])
        return tuple((kind, sum(size for _, size in run)) for kind, run in grouped)

    def tensors(self, matrix: Matrix) -> tuple[HeldTensor, ...]:
        rows = tuple(
            HeldTensor("weight", (outputs, row_bytes(kind, matrix.inputs)), "uint8")
            for kind, outputs in self.runs(matrix.outputs)
        )
        if not self.ordered:
            return rows
        return (*rows, HeldTensor("columns", (len(matrix.names), matrix.inputs), "int64", resident=True))

    def prepared_bytes(self, matrix: Matrix) -> int:
        resident = sum(tensor.bytes for tensor in self.tensors(matrix) if tensor.resident)
        runs = self.runs(matrix.outputs)
        return resident + sum(prepared_bytes(kind, outputs * matrix.inputs) for kind, outputs in runs)


def row_bytes(quant_type: str, inputs: int) -> int:
    """Those of `inputs` weights in whole blocks of a GGUF type."""
    kind = TYPES_BY_NAME[quant_type]
    return inputs // kind.elements * kind.size


def prepared_bytes(quant_type: str, weights: int) -> int:
    """The most that any platform's packing of so many weights of a GGUF type takes."""
    return weights * _PREPARED.get(quant_type, _UNPACKED) // 16
