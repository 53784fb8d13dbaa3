"""Linear layers and experts in the native library with float8_e4m3fn weights and the scales of their blocks.

Weights stay one byte each and are converted in registers; inputs are not quantized. Importing this raises ImportError
if the library cannot be used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv_kernels import expert_oracles
from srv_kernels.cpu.huge_page_arena import HugePageArena
from srv_kernels.cpu.native_experts import NativeExperts, PackedMatrices, check_part, pack_bytes
from srv_kernels.cpu.native_library import DTYPE_IDS, LIBRARY
from srv_kernels.cpu.native_linear import check_outputs, input_rows, output_rows, pack

_BLOCK_OUTPUTS = 32  # in a block of a packed weight
_FACTOR = 256.0  # FP8_FACTOR of native/kernels.h
_WEIGHT = torch.float8_e4m3fn


class Fp8Weight:
    """A weight [outputs, inputs] of float8_e4m3fn, packed once.

    scale: float32 [ceil(outputs / block_outputs), ceil(inputs / block_inputs)]. Raises ValueError for another shape,
    and for an odd `block_inputs` that is less than the inputs.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        block_outputs: int,
        block_inputs: int,
        arena: HugePageArena | None = None,
    ) -> None:
        self.outputs, self.inputs = weight.shape
        check_blocks(weight, scale, block_outputs, block_inputs)
        self._packed = pack(weight.view(torch.int8), arena)
        self._scales, self._by_block = pack_scales(scale, self.outputs, block_outputs)
        self._block_inputs = min(block_inputs, max(1, self.inputs))

    def linear(
        self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, float32_out: bool = False
    ) -> Tensor:
        """x [T, inputs] -> [T, outputs] of x's dtype, or float32. bias: [outputs] of x's dtype.

        out: receives the result; its rows must be contiguous. Raises ValueError if shapes or dtypes do not match.
        """
        rows = input_rows(x, self.inputs, bias)
        check_outputs(self.outputs, bias=bias)
        out = output_rows(out, rows.shape[0], self.outputs, torch.float32 if float32_out else x.dtype)
        LIBRARY.srv_fp8_linear(
            DTYPE_IDS[x.dtype],
            out.data_ptr(),
            rows.data_ptr(),
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows.shape[0],
            self.inputs,
            self.outputs,
            rows.stride(0),
            out.stride(0),
            self._block_inputs,
            self._by_block,
            float32_out,
        )
        return out


def check_blocks(weight: Tensor, scale: Tensor, block_outputs: int, block_inputs: int, parts: int = 1) -> None:
    """Raises ValueError unless a weight [..., outputs, inputs] has float8_e4m3fn values and a scale for each block.

    parts: equal parts of the outputs, each of which begins with a new block.
    """
    *others, outputs, inputs = weight.shape
    if weight.dtype != _WEIGHT or scale.dtype != torch.float32:
        raise ValueError(f"the weight is {weight.dtype} and its scale {scale.dtype}, not {_WEIGHT} and torch.float32")
    if block_inputs % 2 and block_inputs < inputs:
        raise ValueError(f"blocks have {block_inputs} inputs, an odd number that is less than the {inputs} inputs")
    shape = [*others, parts * -(-(outputs // parts) // block_outputs), -(-inputs // block_inputs)]
    if list(scale.shape) != shape:
        raise ValueError(
            f"the scale has shape {list(scale.shape)}; blocks of {block_outputs} x {block_inputs} of this "
            f"weight need {shape}"
        )


def pack_scales(scale: Tensor, outputs: int, block_outputs: int, parts: int = 1) -> tuple[Tensor, bool]:
    """Scales as native/kernels.h has them in LinearArgs, and whether they are those of whole blocks of outputs.

    scale [..., rows, columns] -> [..., blocks, columns] or [..., blocks, columns, 32]. parts: as of `check_blocks`.
    """
    size = outputs // parts
    by_block = block_outputs % _BLOCK_OUTPUTS == 0 and (parts == 1 or size % _BLOCK_OUTPUTS == 0)
    of_output = torch.arange(size) // block_outputs
    rows = torch.cat([of_output + part * (scale.shape[-2] // parts) for part in range(parts)])
    if by_block:
        return (scale.index_select(-2, rows[::_BLOCK_OUTPUTS]) * _FACTOR).contiguous(), True
    blocks = -(-outputs // _BLOCK_OUTPUTS)
    rows = torch.cat([rows, rows[-1:].expand(blocks * _BLOCK_OUTPUTS - outputs)])
    lanes = scale.index_select(-2, rows).unflatten(-2, (blocks, _BLOCK_OUTPUTS)).transpose(-1, -2)
    return (lanes * _FACTOR).contiguous(), False


def linear_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, block_outputs: int, block_inputs: int
) -> Tensor:
    """See the contract. Packs the weight at every call: layers keep an `Fp8Weight` instead."""
    return Fp8Weight(weight, scale, block_outputs, block_inputs).linear(x, bias)


def pack_experts(
    weight: Tensor,
    scale: Tensor,
    block_outputs: int,
    block_inputs: int,
    arena: HugePageArena | None = None,
    parts: int = 1,
    bias: Tensor | None = None,
) -> PackedMatrices:
    """weight float8_e4m3fn [experts, outputs, inputs], scale float32 [experts, rows, columns]; parts: 2 of gate_up with
    a gate.

    bias: [experts, outputs] of the dtype of x.
    """
    experts, outputs, inputs = weight.shape
    check_blocks(weight, scale, block_outputs, block_inputs, parts)
    if bias is not None:
        check_part("bias", bias, (experts, outputs), bias.dtype)
        bias = bias.contiguous()
    scales, by_block = pack_scales(scale, outputs, block_outputs, parts)
    return PackedMatrices(
        pack_bytes(weight.view(torch.int8), arena),
        experts,
        outputs,
        inputs,
        None if bias is None else bias.dtype,
        scales=scales,
        bias=bias,
        scale_inputs=min(block_inputs, max(1, inputs)),
        block_scales=by_block,
    )


def experts_fp8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    block_outputs: int,
    block_inputs: int,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """See the contract. Packs the weights at every call: layers keep a `NativeExperts` instead."""
    blocks = block_outputs, block_inputs
    first = pack_experts(gate_up, gate_up_scale, *blocks, parts=expert_oracles.parts(activation), bias=gate_up_bias)
    second = pack_experts(down, down_scale, *blocks, bias=down_bias)
    return NativeExperts(first, second, activation)(x, ids, weights)
