"""Mixtures of experts in the native library: routing, and experts whose weights are packed once.

Weights are float32, bfloat16, int8, or GGUF-quantized; they are multiplied as stored. Inputs are float32 or bfloat16,
in host memory, and results have the same dtype. A token's result does not depend on the other tokens of a call.
Importing this raises ImportError if the library cannot be used.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.compiler import is_compiling

from srv_kernels import expert_reference
from srv_kernels.cpu.huge_page_arena import HugePageArena
from srv_kernels.cpu.library import ExpertsArgs, RouteArgs
from srv_kernels.cpu.native_library import DTYPE_IDS, LIBRARY
from srv_kernels.cpu.native_linear import GGML_TYPES, input_rows, memory, pack_into
from srv_kernels.expert_oracles import UNGATED, parts

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2, "silu_clamped": 3, "relu2": 4}
SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_of_top_k": 2}


def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """logits float32 [T, E], bias float32 [E] or None -> (ids int64 [T, K], weights float32 [T, K]).

    See the contract. Raises ValueError for a choice that the logits do not have. torch's compiler sees the reference.
    """
    if is_compiling():
        return expert_reference.route_experts(logits, bias, top_k, scoring, renormalize, groups, top_groups, scale)
    tokens, experts = logits.shape
    if experts % groups or not 0 < top_groups <= groups or not 0 < top_k <= experts // groups * top_groups:
        raise ValueError(
            f"cannot choose {top_k} of {experts} experts in the best {top_groups} of {groups} groups: groups must have "
            f"equal sizes, and at least {top_k} experts must be left"
        )
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    added = None if bias is None else bias.contiguous()
    ids = torch.empty(tokens, top_k, dtype=torch.int64)
    weights = torch.empty(tokens, top_k, dtype=torch.float32)
    args = RouteArgs(
        rows.data_ptr(),
        None if added is None else added.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        tokens,
        experts,
        top_k,
        rows.stride(0),
        groups,
        top_groups,
        scale,
        SCORINGS[scoring],
        renormalize,
    )
    LIBRARY.srv_route(DTYPE_IDS[torch.float32], byref(args))
    return ids, weights


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """One packed matrix [outputs, inputs] per expert, one after the other.

    dtype: that of the inputs, None for any. scales: float32 [experts, outputs], of int8 matrices. bias: [experts,
    outputs] of the inputs' dtype. ggml_type: 0 for matrices that are not GGUF-quantized. scale_inputs: of FP8 matrices,
    the inputs that share a scale; their scales are those of `native_fp8.pack_scales`, and block_scales says which.
    """

    packed: Tensor
    experts: int
    outputs: int
    inputs: int
    dtype: torch.dtype | None = None
    scales: Tensor | None = None
    bias: Tensor | None = None
    ggml_type: int = 0
    scale_inputs: int = 0
    block_scales: bool = False


def pack_floats(weight: Tensor, bias: Tensor | None = None, arena: HugePageArena | None = None) -> PackedMatrices:
    """weight [experts, outputs, inputs], bias [experts, outputs] of the same dtype."""
    experts, outputs, inputs = weight.shape
    check_part("bias", bias, (experts, outputs), weight.dtype)
    bias = None if bias is None else bias.contiguous()
    return PackedMatrices(pack_bytes(weight, arena), experts, outputs, inputs, weight.dtype, None, bias)


def pack_int8(weight: Tensor, scales: Tensor, arena: HugePageArena | None = None) -> PackedMatrices:
    """weight int8 [experts, outputs, inputs], scales float32 [experts, outputs]."""
    experts, outputs, inputs = weight.shape
    check_part("scales", scales, (experts, outputs), torch.float32)
    return PackedMatrices(pack_bytes(weight, arena), experts, outputs, inputs, None, scales.contiguous())


def pack_gguf(
    rows: Tensor, quant_type: str, inputs: int, arena: HugePageArena | None = None, bias: Tensor | None = None
) -> PackedMatrices:
    """rows uint8 [experts, outputs, bytes per row], as in a file that is quantized as `quant_type`.

    bias: [experts, outputs] of the dtype of x.
    """
    experts, outputs, row_bytes = rows.shape
    if bias is not None:
        check_part("bias", bias, (experts, outputs), bias.dtype)
    ggml_type = GGML_TYPES[quant_type]
    if row_bytes != LIBRARY.srv_gguf_row_bytes(ggml_type, inputs):
        raise ValueError(f"{inputs} weights of type {quant_type} do not take {row_bytes} bytes")
    size = LIBRARY.srv_packed_gguf_bytes(ggml_type, outputs, inputs)
    packed = memory(experts * size, arena)
    for expert in range(experts):
        one, to = rows[expert].contiguous(), packed[expert * size :]
        LIBRARY.srv_pack_gguf(ggml_type, to.data_ptr(), one.data_ptr(), outputs, inputs, one.stride(0))
    bias = None if bias is None else bias.contiguous()
    dtype = None if bias is None else bias.dtype
    return PackedMatrices(packed, experts, outputs, inputs, dtype, bias=bias, ggml_type=ggml_type)


def pack_bytes(weight: Tensor, arena: HugePageArena | None) -> Tensor:
    """[experts, outputs, inputs] -> uint8: the packed layouts, one after the other."""
    experts, outputs, inputs = weight.shape
    size = LIBRARY.srv_packed_elements(outputs, inputs) * weight.itemsize
    packed = memory(experts * size, arena)
    for expert in range(experts):
        pack_into(packed[expert * size : (expert + 1) * size].view(weight.dtype), weight[expert])
    return packed


def check_part(name: str, part: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if part is not None and (part.shape != shape or part.dtype != dtype):
        raise ValueError(f"{name} is {part.dtype} {list(part.shape)}; these weights need {dtype} {list(shape)}")


class NativeExperts:
    """The experts of a layer: (x [T, H], ids int64 [T, K], weights float32 [T, K]) -> [T, H] of x's dtype.

    gate_up: [2 I, H] per expert, the gate first, or [I, H] without a gate; down: [H, I]. activation: a name in
    `ACTIVATIONS`. Raises ValueError if they do not fit each other, or for inputs that do not fit them.
    """

    def __init__(self, gate_up: PackedMatrices, down: PackedMatrices, activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation} is not one of {', '.join(ACTIVATIONS)}")
        outputs = parts(activation) * down.inputs
        if (gate_up.experts, gate_up.outputs, gate_up.inputs) != (down.experts, outputs, down.outputs):
            rows = "I" if activation in UNGATED else "2 I"
            raise ValueError(
                f"gate_up has {gate_up.experts} matrices {[gate_up.outputs, gate_up.inputs]} and down has "
                f"{down.experts} matrices {[down.outputs, down.inputs]}; with {activation}, they must be [{rows}, H] "
                "and [H, I]"
            )
        alike = (gate_up.ggml_type != 0, gate_up.scales is None) == (down.ggml_type != 0, down.scales is None)
        if gate_up.dtype != down.dtype and not (alike and None in (gate_up.dtype, down.dtype)):  # one has a bias
            raise ValueError(f"gate_up is {gate_up.dtype} and down is {down.dtype}; they must have one dtype")
        if down.ggml_type != 0 and down.bias is not None:  # the inputs of its product are float32
            down = replace(down, bias=down.bias.float(), dtype=None)
        self._gate_up, self._down, self._activation = gate_up, down, ACTIVATIONS[activation]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        first, second = self._gate_up, self._down
        rows = input_rows(x, first.inputs, None)
        for matrices in (first, second):
            if matrices.dtype not in (None, rows.dtype):
                raise ValueError(f"x is {rows.dtype}, but the weights are {matrices.dtype}")
        tokens, top_k = ids.shape
        if rows.shape[0] != tokens or weights.shape != ids.shape:
            raise ValueError(
                f"{rows.shape[0]} tokens have ids {list(ids.shape)} and weights {list(weights.shape)}; both must have "
                "a row per token, of the same length"
            )
        if ids.dtype != torch.int64 or weights.dtype != torch.float32:
            raise ValueError(f"ids are {ids.dtype} and weights {weights.dtype}; they must be int64 and float32")
        ids, weights = ids.contiguous(), weights.contiguous()
        out = torch.empty(tokens, first.inputs, dtype=x.dtype)
        args = ExpertsArgs(
            rows.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            first.packed.data_ptr(),
            second.packed.data_ptr(),
            _address(first.bias),
            _address(second.bias),
            _address(first.scales),
            _address(second.scales),
            out.data_ptr(),
            tokens,
            first.inputs,
            second.inputs,
            first.experts,
            top_k,
            rows.stride(0),
            first.ggml_type,
            second.ggml_type,
            self._activation,
            first.block_scales,
            second.block_scales,
            first.scale_inputs,
            second.scale_inputs,
        )
        LIBRARY.srv_experts(DTYPE_IDS[x.dtype], byref(args))
        return out


def _address(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr()


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """See the contract. Packs the weights at every call: layers keep a `NativeExperts` instead."""
    first, second = pack_floats(gate_up, gate_up_bias), pack_floats(down, down_bias)
    return NativeExperts(first, second, activation)(x, ids, weights)


def experts_int8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    activation: str,
) -> Tensor:
    """See the contract. Packs the weights at every call. Inputs are not quantized."""
    first, second = pack_int8(gate_up, gate_up_scale), pack_int8(down, down_scale)
    return NativeExperts(first, second, activation)(x, ids, weights)


def experts_gguf(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_type: str,
    down: Tensor,
    down_type: str,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """See the contract. Packs the weights at every call. Inputs of both products are quantized, as those of layers."""
    hidden, intermediate = down.shape[1], gate_up.shape[1] // parts(activation)
    first = pack_gguf(gate_up, gate_up_type, hidden, bias=gate_up_bias)
    second = pack_gguf(down, down_type, intermediate, bias=down_bias)
    return NativeExperts(first, second, activation)(x, ids, weights)
