"""Kernels on weights that are repacked once after loading, by the native library or otherwise by zentorch or oneDNN.

Layers of one matrix or several, and the experts of a layer, which only the native library repacks.

zentorch is an optional package (`srv_cpu.extensions`).

Native kernels read a weight sequentially, at 32 GB/s; oneDNN reads its blocked layout at 12 GB/s (one row, bfloat16,
two Zen 4 cores, all weights of a model in turn, so that none is in the caches). Without native kernels the blocked
layout is still faster than `F.linear` on a plain matrix. Its operators are those that torch's compiler emits for frozen
weights; if torch lacks them, or for other dtypes, the default kernel stays.

A layer is known by the op that it calls (`srv.models.layers.op_layer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from srv.models.layers.experts import ExpertWeights
from srv.models.layers.op_layer import OpLayer, op_layers
from srv.platform.op_choice import NAMED_BY
from srv_cpu import op_specs
from srv_cpu.extensions import ZENTORCH, ZentorchLinear
from srv_cpu.op_specs import NATIVE, NATIVE_FULL, ONEDNN
from srv_kernels.cpu.huge_page_arena import HugePageArena
from srv_kernels.cpu.library import load
from srv_kernels.expert_oracles import parts

if TYPE_CHECKING:
    from srv_kernels.cpu.native_linear import GGUFWeight, PackedWeight

Kernel: TypeAlias = Callable[..., Tensor]
MakeKernel: TypeAlias = Callable[[OpLayer], Kernel]
_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 16  # oneDNN optimizes the layout for this batch size; results do not depend on it


class PackedKernel:
    """y = x Wᵀ + b over a blocked copy of W."""

    __slots__ = ("_bias", "_linear", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._weight, self._bias, "none", [], "")


def packing_available() -> bool:
    """Whether this build of torch has oneDNN and its prepacking ops."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack(model: torch.nn.Module) -> tuple[int, str]:
    """Repack the weights of all layers whose op has a kernel, and free the originals except those of tied layers.

    Returns the number of repacked weights and the name of the kernels.
    """
    makers, implementation, returns_sums = _makers()
    packed = 0
    with torch.no_grad():
        for layer in op_layers(model):
            if layer.op not in makers or layer.dtype not in _DTYPES or (layer.float32_results and not returns_sums):
                continue
            chosen = isinstance(layer, ExpertWeights) or layer.op in (*NAMED_BY, "linear_gguf")
            if chosen and layer.implementation not in (implementation, NATIVE_FULL):
                continue  # another implementation was chosen
            layer.kernel = makers[layer.op](layer)
            if layer.implementation != NATIVE_FULL:
                layer.implementation = implementation
            if not layer.tied:
                layer.release()
            packed += 1
    return packed, f"{implementation} kernels, {load().isa}" if implementation == NATIVE else implementation


def _makers() -> tuple[Mapping[str, MakeKernel], str, bool]:
    """The functions that make a kernel for a layer, by its op; its name in `op_specs`; whether results are float32.

    Without those, the output layer keeps its default kernel.
    """
    if load().library is not None:
        return NativeKernels().makers(), NATIVE, True
    if ZENTORCH.unusable() is None:
        return {"linear": lambda layer: ZentorchLinear(**layer.operands()[0])}, op_specs.ZENTORCH, False
    if packing_available():
        return {"linear": lambda layer: PackedKernel(**layer.operands()[0])}, ONEDNN, False
    return {}, "torch's default kernels", False


class NativeKernels:
    """Makes the kernels of the native library for the layers of one model, whose packed weights share an arena."""

    def __init__(self) -> None:
        from srv_kernels.cpu import native_experts, native_fp8, native_linear

        self._library, self._experts, self._arena = native_linear, native_experts, HugePageArena()
        self._floats = native_fp8
        self._blocks: dict[int, GGUFWeight] = {}  # by the id of the rows, which a tied layer shares with another one

    def makers(self) -> Mapping[str, MakeKernel]:
        return {
            "linear": self._linear,
            "linear_int8": partial(self._int8, self._library.Int8WeightLinear),
            "linear_w8a8": partial(self._int8, self._library.W8A8Linear),
            "linear_w8a8_static": self._static,
            "linear_gguf": self._gguf,
            "rows_gguf": self._gguf_rows,
            "linear_fp8": self._fp8,
            "experts": self._float_experts,
            "experts_int8": self._int8_experts,
            "experts_gguf": self._gguf_experts,
            "experts_fp8": self._fp8_experts,
        }

    def _linear(self, layer: OpLayer) -> Kernel:
        return self._library.linear(**layer.operands()[0], arena=self._arena, float32_out=layer.float32_results)

    def _int8(self, kind: Callable[..., Kernel], layer: OpLayer) -> Kernel:
        (operands,) = layer.operands()
        return kind(
            operands["weight"],
            operands["weight_scale"],
            operands["bias"],
            arena=self._arena,
            float32_out=layer.float32_results,
        )

    def _static(self, layer: OpLayer) -> Kernel:
        (operands,) = layer.operands()
        return self._library.W8A8Linear(
            operands["weight"],
            operands["deq_scale"],
            int32_bias=operands["quant_bias"],
            static=(1.0 / float(operands["input_scale"]), float(operands["input_offset"])),
            arena=self._arena,
            float32_out=layer.float32_results,
        )

    def _gguf(self, layer: OpLayer) -> Kernel:
        full = layer.implementation == NATIVE_FULL
        kind = self._library.DequantizedLinear if full else self._library.FusedPackedLinear
        return kind(self._packed_blocks(layer), layer.added_bias, layer.float32_results)

    def _gguf_rows(self, layer: OpLayer) -> Kernel:
        (weight,) = self._packed_blocks(layer)
        return partial(weight.rows, dtype=layer.dtype)

    def _float_experts(self, layer: OpLayer) -> Kernel:
        (operands,) = layer.operands()
        return self._experts.NativeExperts(
            self._experts.pack_floats(operands["gate_up"], operands["gate_up_bias"], self._arena),
            self._experts.pack_floats(operands["down"], operands["down_bias"], self._arena),
            operands["activation"],
        )

    def _int8_experts(self, layer: OpLayer) -> Kernel:
        (operands,) = layer.operands()
        return self._experts.NativeExperts(
            self._experts.pack_int8(operands["gate_up"], operands["gate_up_scale"], self._arena),
            self._experts.pack_int8(operands["down"], operands["down_scale"], self._arena),
            operands["activation"],
        )

    def _gguf_experts(self, layer: OpLayer) -> Kernel:
        (operands,) = layer.operands()
        gate_up, down = operands["gate_up"], operands["down"]
        intermediate = gate_up.shape[1] // parts(operands["activation"])
        return self._experts.NativeExperts(
            self._experts.pack_gguf(
                gate_up, operands["gate_up_type"], layer.inputs, self._arena, operands["gate_up_bias"]
            ),
            self._experts.pack_gguf(down, operands["down_type"], intermediate, self._arena, operands["down_bias"]),
            operands["activation"],
        )

    def _fp8(self, layer: OpLayer) -> Kernel:
        weights: list[PackedWeight] = []
        biases: list[Tensor] = []
        for operands in layer.operands():
            names = ("weight", "scale", "block_outputs", "block_inputs")
            weights.append(self._floats.Fp8Weight(*(operands[name] for name in names), arena=self._arena))
            biases += [] if operands["bias"] is None else [operands["bias"]]
        return self._library.FusedPackedLinear(weights, torch.cat(biases) if biases else None, layer.float32_results)

    def _fp8_experts(self, layer: OpLayer) -> Kernel:
        (operands,) = layer.operands()
        blocks = operands["block_outputs"], operands["block_inputs"]
        pack = self._floats.pack_experts
        return self._experts.NativeExperts(
            pack(
                operands["gate_up"],
                operands["gate_up_scale"],
                *blocks,
                self._arena,
                parts=parts(operands["activation"]),
                bias=operands["gate_up_bias"],
            ),
            pack(operands["down"], operands["down_scale"], *blocks, self._arena, bias=operands["down_bias"]),
            operands["activation"],
        )

    def _packed_blocks(self, layer: OpLayer) -> list[GGUFWeight]:
        """The packed weights of a layer's matrices; each matrix is packed once."""
        weights: list[GGUFWeight] = []
        for operands in layer.operands():
            rows = operands["rows"]
            if id(rows) not in self._blocks:
                self._blocks[id(rows)] = self._library.GGUFWeight(
                    rows, operands["quant_type"], layer.inputs, self._arena, layer.column_order
                )
            weights.append(self._blocks[id(rows)])
        return weights
