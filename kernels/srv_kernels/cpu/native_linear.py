"""Linear layers in the native library with weights that are packed once: float32, bfloat16, int8, or GGUF-quantized.

Inputs are float32 or bfloat16, in host memory. Results have the same dtype, or are the float32 sums (`float32_out`).
Importing this raises ImportError if the library cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from srv_kernels.cpu.huge_page_arena import HugePageArena
from srv_kernels.cpu.library import GgufLinearArgs, GgufRowsArgs, W8a8LinearArgs
from srv_kernels.cpu.native_library import DTYPE_IDS, LIBRARY, rows_of

_SCRATCH = (None, None, None, None)  # filled in by the library
_PACKED_TYPES = {**DTYPE_IDS, torch.int8: 2}


def input_rows(x: Tensor, inputs: int, bias: Tensor | None) -> Tensor:
    """x as a matrix. Raises ValueError for sizes and dtypes that the kernels do not support."""
    if x.shape[-1] != inputs:
        raise ValueError(f"x has {x.shape[-1]} columns, but the weight has {inputs} inputs")
    if x.dtype not in DTYPE_IDS or (bias is not None and bias.dtype != x.dtype):
        and_bias = "" if bias is None else f" with a bias of {bias.dtype}"
        raise ValueError(
            f"x is {x.dtype}{and_bias}; the native kernels take {' or '.join(map(str, DTYPE_IDS))}, the same for both"
        )
    return x if x.dim() == 2 and x.stride(1) == 1 else rows_of(x)


def check_outputs(outputs: int, **others: Tensor | None) -> None:
    """Raises ValueError for tensors that do not have one element per output."""
    for name, other in others.items():
        if other is not None and tuple(other.shape) != (outputs,):
            raise ValueError(f"{name} has shape {tuple(other.shape)}, but the weight has {outputs} outputs")


def output_rows(out: Tensor | None, rows: int, outputs: int, dtype: torch.dtype) -> Tensor:
    """`out` if one is given, else a new [rows, outputs]. Raises ValueError for an `out` that kernels would misread."""
    if out is None:
        return torch.empty(rows, outputs, dtype=dtype)
    if out.shape != (rows, outputs) or out.dtype != dtype or out.stride(1) != 1:
        raise ValueError(
            f"out has shape {list(out.shape)}, {out.dtype} and strides {list(out.stride())}; it must be "
            f"[{rows}, {outputs}], {dtype}, with contiguous rows"
        )
    return out


def memory(size: int, arena: HugePageArena | None) -> Tensor:
    """uint8 [size], uninitialized; in `arena` if one is given."""
    return torch.empty(size, dtype=torch.uint8) if arena is None else arena.allocate(size)


def pack(weight: Tensor, arena: HugePageArena | None = None) -> Tensor:
    """[outputs, inputs] -> the packed layout of native/linear.cpp, flat; in `arena` if one is given."""
    rows = rows_of(weight)
    outputs, inputs = rows.shape
    size = LIBRARY.srv_packed_elements(outputs, inputs) * weight.itemsize
    packed = memory(size, arena).view(weight.dtype)
    pack_into(packed, rows)
    return packed


def pack_into(packed: Tensor, weight: Tensor) -> None:
    """As `pack`, into the flat `packed`."""
    rows = rows_of(weight)
    outputs, inputs = rows.shape
    LIBRARY.srv_pack(_PACKED_TYPES[weight.dtype], packed.data_ptr(), rows.data_ptr(), outputs, inputs, rows.stride(0))


def linear(
    weight: Tensor, bias: Tensor | None, arena: HugePageArena | None = None, float32_out: bool = False
) -> Callable[[Tensor], Tensor]:
    """A linear layer with a weight [outputs, inputs] and bias [outputs], of one dtype: x [T, inputs] -> [T, outputs].

    The weight is copied to a packed layout once. This function and the layer raise ValueError if shapes or dtypes do
    not match.
    """
    outputs, inputs = weight.shape
    check_outputs(outputs, bias=bias)
    packed, type_id = pack(weight, arena), DTYPE_IDS[weight.dtype]
    bias = None if bias is None else bias.contiguous()
    weight_ptr, bias_ptr = packed.data_ptr(), None if bias is None else bias.data_ptr()
    kernel, dtype = LIBRARY.srv_linear, weight.dtype
    result = torch.float32 if float32_out else dtype

    def multiply(x: Tensor, _keep_alive: tuple[Tensor, Tensor | None] = (packed, bias)) -> Tensor:
        rows = input_rows(x, inputs, bias)
        if rows.dtype != dtype:
            raise ValueError(f"x is {rows.dtype}, but the weight is {dtype}")
        out = torch.empty(rows.shape[0], outputs, dtype=result)
        kernel(
            type_id,
            out.data_ptr(),
            rows.data_ptr(),
            weight_ptr,
            bias_ptr,
            rows.shape[0],
            inputs,
            outputs,
            rows.stride(0),
            float32_out,
        )
        return out

    return multiply


class Int8WeightLinear:
    """A linear layer with an int8 weight [outputs, inputs]: x [T, inputs] -> [T, outputs] of x's dtype.

    Activations are not quantized. scales: float32 [outputs]. bias: [outputs] of x's dtype, added last. The weight is
    copied to a packed layout once.
    """

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        arena: HugePageArena | None = None,
        float32_out: bool = False,
    ) -> None:
        self._outputs, self._inputs = weight.shape
        self._float32_out = float32_out
        check_outputs(self._outputs, scales=scales, bias=bias)
        self._packed, self._scales = pack(weight, arena), scales.float().contiguous()
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        rows = input_rows(x, self._inputs, self._bias)
        out = torch.empty(rows.shape[0], self._outputs, dtype=torch.float32 if self._float32_out else x.dtype)
        LIBRARY.srv_int8_weight_linear(
            DTYPE_IDS[x.dtype],
            out.data_ptr(),
            rows.data_ptr(),
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            rows.shape[0],
            self._inputs,
            self._outputs,
            rows.stride(0),
            self._float32_out,
        )
        return out


class W8A8Linear:
    """A linear layer with an int8 weight [outputs, inputs]: x [T, inputs] -> [T, outputs] of x's dtype.

    scales: float32 [outputs]. static: (1 / input_scale, input_offset) quantizes x with fixed parameters, and int32_bias
    int32 [outputs] is added to the integer sums; otherwise each row is quantized by its own largest magnitude. bias:
    [outputs] of x's dtype, added last. The weight is copied to a packed layout once.
    """

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        int32_bias: Tensor | None = None,
        static: tuple[float, float] = (0.0, 0.0),
        arena: HugePageArena | None = None,
        float32_out: bool = False,
    ) -> None:
        self._float32_out = float32_out
        rows = rows_of(weight)
        self._outputs, self._inputs = rows.shape
        check_outputs(self._outputs, scales=scales, bias=bias, int32_bias=int32_bias)
        self._packed = memory(LIBRARY.srv_packed_w8a8_bytes(self._outputs, self._inputs), arena)
        LIBRARY.srv_pack_w8a8(self._packed.data_ptr(), rows.data_ptr(), self._outputs, self._inputs, rows.stride(0))
        compensation = -128 * weight.sum(1, dtype=torch.int32)
        self._compensation = compensation if int32_bias is None else compensation + int32_bias.int()
        self._scales, self._static = scales.float().contiguous(), static
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        rows = input_rows(x, self._inputs, self._bias)
        count = rows.shape[0]
        out = torch.empty(count, self._outputs, dtype=torch.float32 if self._float32_out else x.dtype)
        args = W8a8LinearArgs(
            rows.data_ptr(),
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            self._compensation.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            *_SCRATCH[:2],
            count,
            self._inputs,
            self._outputs,
            rows.stride(0),
            *self._static,
            self._float32_out,
        )
        LIBRARY.srv_w8a8_linear(DTYPE_IDS[x.dtype], byref(args))
        return out


# The quantization types that kernels multiply without dequantizing the weight, with their ggml_type. NF4 and FP4 are
# those of bitsandbytes, and no types of GGUF files.
GGML_TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ3_XXS": 18,
    "IQ1_S": 19,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "IQ4_XS": 23,
    "IQ1_M": 29,
    "TQ1_0": 34,
    "TQ2_0": 35,
    "MXFP4": 39,
    "NF4": 1000,
    "FP4": 1001,
}


class GGUFWeight:
    """A GGUF-quantized weight [outputs, inputs], repacked once.

    rows: uint8 [outputs, bytes per row], as in the file. quant_type: a name in `GGML_TYPES`. columns: int64 [inputs],
    the column of x that each input of the weight is for; None: they are in the same order.
    """

    def __init__(
        self,
        rows: Tensor,
        quant_type: str,
        inputs: int,
        arena: HugePageArena | None = None,
        columns: Tensor | None = None,
    ) -> None:
        self.outputs, self.inputs = rows.shape[0], inputs
        self._columns = None if columns is None else _checked_columns(columns, inputs)
        self._ggml_type = GGML_TYPES[quant_type]
        if rows.shape[1] != LIBRARY.srv_gguf_row_bytes(self._ggml_type, inputs):
            raise ValueError(f"{inputs} weights of type {quant_type} do not take {rows.shape[1]} bytes")
        rows = rows_of(rows)
        self._packed = memory(LIBRARY.srv_packed_gguf_bytes(self._ggml_type, self.outputs, inputs), arena)
        LIBRARY.srv_pack_gguf(
            self._ggml_type, self._packed.data_ptr(), rows.data_ptr(), self.outputs, inputs, rows.stride(0)
        )

    def linear(
        self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, float32_out: bool = False
    ) -> Tensor:
        """x [T, inputs] -> [T, outputs] of x's dtype, or float32.

        x is quantized to 8 bits with a scale per 16 inputs: 1/127 of their largest magnitude, rounded up to an integer
        multiple of the row's scale, which is at most 1/17,045 of the row's largest such scale and at least 2^-120. With
        AVX2 but not AVX-512, Q5_0, Q8_0, Q6_K and types with a table of bytes quantize x to 16 bits instead: one scale
        per row, 1/32,767 of its largest magnitude, at least 2^-120. bias: [outputs] of x's dtype. out: receives the
        result; rows must be contiguous.
        """
        rows = input_rows(x, self.inputs, bias)
        if bias is not None:
            check_outputs(self.outputs, bias=bias)
        out = output_rows(out, rows.shape[0], self.outputs, torch.float32 if float32_out else x.dtype)
        args = GgufLinearArgs(
            rows.data_ptr(),
            self._packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *_SCRATCH,
            rows.shape[0],
            self.inputs,
            self.outputs,
            rows.stride(0),
            out.stride(0),
            self._ggml_type,
            0,  # filled in by the kernel
            float32_out,
            None,
            None if self._columns is None else self._columns.data_ptr(),
        )
        LIBRARY.srv_gguf_linear(DTYPE_IDS[x.dtype], byref(args))
        return out

    def ordered(self, x: Tensor) -> Tensor:
        """The columns of x in the order of the weight's inputs."""
        return x if self._columns is None else x[:, self._columns]

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """indices int64 [T], each below `outputs` (not checked) -> [T, inputs]: dequantized rows."""
        indices = indices.contiguous()
        out = torch.empty(indices.shape[0], self.inputs, dtype=dtype)
        args = GgufRowsArgs(
            self._packed.data_ptr(), indices.data_ptr(), out.data_ptr(), indices.shape[0], self.inputs, self._ggml_type
        )
        LIBRARY.srv_gguf_rows(DTYPE_IDS[dtype], byref(args))
        return out


_AT_ONCE = 1 << 19  # weights that are dequantized at a time: 2 MiB in float32, which stay in a core's cache


class DequantizedLinear:
    """As `FusedPackedLinear`, without rounding x: sums in float32 of float32 weights, dequantized some rows at a time.

    It reads as few bytes from memory, and takes longer, because every call dequantizes the weights.
    """

    def __init__(self, weights: Sequence[GGUFWeight], bias: Tensor | None = None, float32_out: bool = False) -> None:
        self._weights, self._bias, self._float32_out = tuple(weights), bias, float32_out
        check_outputs(sum(weight.outputs for weight in weights), bias=bias)
        rows = max(1, _AT_ONCE // weights[0].inputs)
        self._parts = [torch.arange(weight.outputs).split(rows) for weight in self._weights]

    def __call__(self, x: Tensor) -> Tensor:
        wide, results = input_rows(x, self._weights[0].inputs, self._bias).float(), list[Tensor]()
        for weight, parts in zip(self._weights, self._parts, strict=True):
            ordered = weight.ordered(wide)
            results += [F.linear(ordered, weight.rows(part, torch.float32)) for part in parts]
        out = torch.cat(results, -1)
        out = out if self._bias is None else out + self._bias.float()
        return out if self._float32_out else out.to(x.dtype)


def _checked_columns(columns: Tensor, inputs: int) -> Tensor:
    """As int32, contiguous. Raises ValueError for columns that kernels would read past the end of x."""
    if columns.shape != (inputs,) or bool(((columns < 0) | (columns >= inputs)).any()):
        raise ValueError(f"columns has shape {list(columns.shape)} and must be {inputs} columns of x, from 0 on")
    return columns.to(torch.int32).contiguous()


class PackedWeight(Protocol):
    """A packed weight that multiplies into a part of a result."""

    outputs: int

    def linear(
        self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, float32_out: bool = False
    ) -> Tensor: ...


class FusedPackedLinear:
    """One linear layer for several weights, outputs concatenated: x [T, inputs] -> [T, all outputs]."""

    def __init__(self, weights: Sequence[PackedWeight], bias: Tensor | None = None, float32_out: bool = False) -> None:
        self._float32_out = float32_out
        self._weights, self._outputs = tuple(weights), sum(weight.outputs for weight in weights)
        parts = [None] * len(weights) if bias is None else torch.split(bias, [weight.outputs for weight in weights])
        self._biases = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self._weights) == 1:
            return self._weights[0].linear(x, self._biases[0], float32_out=self._float32_out)
        x = rows_of(x)
        out = torch.empty(x.shape[0], self._outputs, dtype=torch.float32 if self._float32_out else x.dtype)
        start = 0
        for weight, bias in zip(self._weights, self._biases, strict=True):
            weight.linear(x, bias, out[:, start : start + weight.outputs], self._float32_out)
            start += weight.outputs
        return out
