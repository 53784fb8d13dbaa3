"""Matrix products by the native library, of weights that are packed once: plain, of 8-bit integers, of GGUF blocks.

Inputs are float32 or bfloat16, in host memory. Import raises ImportError where the library cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref

import torch
from torch import Tensor

from srv_kernels.cpu.huge_page_arena import HugePageArena
from srv_kernels.cpu.library import GgufLinearArgs, GgufRowsArgs, W8a8LinearArgs
from srv_kernels.cpu.native_library import LIBRARY, TYPES, rows_of

_OWN = (None, None, None, None)  # scratch: the library has its own
_PACKED_TYPES = {**TYPES, torch.int8: 2}


def _input_rows(x: Tensor, inputs: int, bias: Tensor | None) -> Tensor:
    """x as the rows of a product. Raises ValueError where the kernels would read past them, or take them for others."""
    if x.shape[-1] != inputs:
        raise ValueError(f"{x.shape[-1]} inputs for a weight of {inputs}")
    if x.dtype not in TYPES or (bias is not None and bias.dtype != x.dtype):
        beside = "" if bias is None else f" and a bias of {bias.dtype}"
        raise ValueError(
            f"inputs of {x.dtype}{beside}: native products take {' or '.join(map(str, TYPES))}, both alike"
        )
    return x if x.dim() == 2 and x.stride(1) == 1 else rows_of(x)


def _check_outputs(outputs: int, **others: Tensor | None) -> None:
    """Raises ValueError where what goes with each output is not one for each."""
    for name, other in others.items():
        if other is not None and tuple(other.shape) != (outputs,):
            raise ValueError(f"{name} of shape {tuple(other.shape)} for a weight of {outputs} outputs")


def _memory(size: int, arena: HugePageArena | None) -> Tensor:
    return torch.empty(size, dtype=torch.uint8) if arena is None else arena.take(size)


def pack(weight: Tensor, arena: HugePageArena | None = None) -> Tensor:
    """[outputs, inputs] -> the same numbers in blocks, as `linear` reads them (native/linear.cpp); flat.

    They lie in `arena`, if one is given, as everything does that is packed here.
    """
    rows = rows_of(weight)
    outputs, inputs = rows.shape
    size = LIBRARY.srv_packed_elements(outputs, inputs) * weight.itemsize
    packed = _memory(size, arena).view(weight.dtype)
    LIBRARY.srv_pack(_PACKED_TYPES[weight.dtype], packed.data_ptr(), rows.data_ptr(), outputs, inputs, rows.stride(0))
    return packed


def linear(weight: Tensor, bias: Tensor | None, arena: HugePageArena | None = None) -> Callable[[Tensor], Tensor]:
    """The product with a weight [outputs, inputs] and bias [outputs], of one dtype: x [T, inputs] -> [T, outputs].

    The weight is packed, that is copied, once; afterwards only the copy is used. Raises ValueError for shapes and
    dtypes that do not go together, as the product does.
    """
    outputs, inputs = weight.shape
    _check_outputs(outputs, bias=bias)
    packed, type_id = pack(weight, arena), TYPES[weight.dtype]
    bias = None if bias is None else bias.contiguous()
    weight_at, bias_at = packed.data_ptr(), None if bias is None else bias.data_ptr()
    product, dtype = LIBRARY.srv_linear, weight.dtype

    def multiply(x: Tensor, _keep: tuple[Tensor, Tensor | None] = (packed, bias)) -> Tensor:
        rows = _input_rows(x, inputs, bias)
        if rows.dtype != dtype:
            raise ValueError(f"inputs of {rows.dtype} for a weight of {dtype}")
        out = torch.empty(rows.shape[0], outputs, dtype=dtype)
        product(
            type_id,
            out.data_ptr(),
            rows.data_ptr(),
            weight_at,
            bias_at,
            rows.shape[0],
            inputs,
            outputs,
            rows.stride(0),
        )
        return out

    return multiply


class Int8WeightLinear:
    """The product with a weight of 8-bit integers [outputs, inputs]: x [T, inputs] -> [T, outputs] of x's dtype.

    Activations keep their dtype. scales: float32 [outputs]. bias: [outputs] of x's dtype, added last. The weight is
    packed, that is copied, once; afterwards only the copy is used.
    """

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None = None, arena: HugePageArena | None = None
    ) -> None:
        self._outputs, self._inputs = weight.shape
        _check_outputs(self._outputs, scales=scales, bias=bias)
        self._packed, self._scales = pack(weight, arena), scales.float().contiguous()
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        rows = _input_rows(x, self._inputs, self._bias)
        out = torch.empty(rows.shape[0], self._outputs, dtype=x.dtype)
        LIBRARY.srv_int8_weight_linear(
            TYPES[x.dtype],
            out.data_ptr(),
            rows.data_ptr(),
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            rows.shape[0],
            self._inputs,
            self._outputs,
            rows.stride(0),
        )
        return out


class W8A8Linear:
    """The product with a weight of 8-bit integers [outputs, inputs]: x [T, inputs] -> [T, outputs] of x's dtype.

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
    ) -> None:
        rows = rows_of(weight)
        self._outputs, self._inputs = rows.shape
        _check_outputs(self._outputs, scales=scales, bias=bias, int32_bias=int32_bias)
        self._packed = _memory(LIBRARY.srv_packed_w8a8_bytes(self._outputs, self._inputs), arena)
        LIBRARY.srv_pack_w8a8(self._packed.data_ptr(), rows.data_ptr(), self._outputs, self._inputs, rows.stride(0))
        compensation = -128 * weight.sum(1, dtype=torch.int32)
        self._compensation = compensation if int32_bias is None else compensation + int32_bias.int()
        self._scales, self._static = scales.float().contiguous(), static
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        rows = _input_rows(x, self._inputs, self._bias)
        count = rows.shape[0]
        out = torch.empty(count, self._outputs, dtype=x.dtype)
        args = W8a8LinearArgs(
            rows.data_ptr(),
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            self._compensation.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            *_OWN[:2],
            count,
            self._inputs,
            self._outputs,
            rows.stride(0),
            *self._static,
        )
        LIBRARY.srv_w8a8_linear(TYPES[x.dtype], byref(args))
        return out


# The types of GGUF files whose blocks are multiplied as they are, by their numbers there.
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
}


class GGUFWeight:
    """A weight [outputs, inputs] in the blocks of a GGUF file, repacked once.

    rows: uint8 [outputs, bytes of a row], as the file has them. `quant_type`: the type's name, one of `GGML_TYPES`.
    """

    def __init__(self, rows: Tensor, quant_type: str, inputs: int, arena: HugePageArena | None = None) -> None:
        self.outputs, self.inputs = rows.shape[0], inputs
        self._ggml_type = GGML_TYPES[quant_type]
        if rows.shape[1] != LIBRARY.srv_gguf_row_bytes(self._ggml_type, inputs):
            raise ValueError(f"{inputs} weights of type {quant_type} do not lie in {rows.shape[1]} bytes")
        rows = rows_of(rows)
        self._packed = _memory(LIBRARY.srv_packed_gguf_bytes(self._ggml_type, self.outputs, inputs), arena)
        LIBRARY.srv_pack_gguf(
            self._ggml_type, self._packed.data_ptr(), rows.data_ptr(), self.outputs, inputs, rows.stride(0)
        )

    @property
    def bytes(self) -> int:
        """What a product reads of it."""
        return self._packed.nbytes

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, inputs] -> [T, outputs] of x's dtype.

        Every 16 inputs of a row are rounded to steps of 1/127 of their largest, rounded up to a multiple of the row's
        unit, which is 1/17,045 of the row's largest step or less, and 2^-120 at least. With AVX2 and without AVX-512,
        Q5_0, Q8_0 and Q6_K take steps of 1/32,767 of the row's largest, 2^-120 at least. bias: [outputs] of x's
        dtype. `out`: where the result goes, its rows' elements beside one another.
        """
        rows = _input_rows(x, self.inputs, bias)
        if bias is not None:
            _check_outputs(self.outputs, bias=bias)
        count = rows.shape[0]
        if out is None:
            out = torch.empty(count, self.outputs, dtype=x.dtype)
        elif out.shape != (count, self.outputs) or out.dtype != x.dtype or out.stride(1) != 1:
            raise ValueError(
                f"[{count}, {self.outputs}] of {x.dtype} do not fit {list(out.shape)} of {out.dtype} and strides "
                f"{list(out.stride())}"
            )
        args = GgufLinearArgs(
            rows.data_ptr(),
            self._packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *_OWN,
            count,
            self.inputs,
            self.outputs,
            rows.stride(0),
            out.stride(0),
            self._ggml_type,
        )
        LIBRARY.srv_gguf_linear(TYPES[x.dtype], byref(args))
        return out

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """indices int64 [T], each below `outputs` (not checked) -> [T, inputs]: rows as plain numbers."""
        where = indices.contiguous()
        out = torch.empty(where.shape[0], self.inputs, dtype=dtype)
        args = GgufRowsArgs(
            self._packed.data_ptr(), where.data_ptr(), out.data_ptr(), where.shape[0], self.inputs, self._ggml_type
        )
        LIBRARY.srv_gguf_rows(TYPES[dtype], byref(args))
        return out


class FusedGGUFLinear:
    """The product with several matrices below one another: x [T, inputs] -> [T, all their outputs] of x's dtype."""

    def __init__(self, weights: Sequence[GGUFWeight], bias: Tensor | None = None) -> None:
        self._weights, self._outputs = tuple(weights), sum(each.outputs for each in weights)
        parts = [None] * len(weights) if bias is None else torch.split(bias, [each.outputs for each in weights])
        self._biases = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self._weights) == 1:
            return self._weights[0].linear(x, self._biases[0])
        x = rows_of(x)
        out = torch.empty(x.shape[0], self._outputs, dtype=x.dtype)
        at = 0
        for weight, bias in zip(self._weights, self._biases, strict=True):
            weight.linear(x, bias, out[:, at : at + weight.outputs])
            at += weight.outputs
        return out
