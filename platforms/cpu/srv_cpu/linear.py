"""Kernels on weights that are repacked once after loading, by the native library or otherwise by oneDNN.

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

from srv.models.layers.op_layer import OpLayer, op_layers
from srv_kernels.cpu.huge_page_arena import HugePageArena
from srv_kernels.cpu.library import load

if TYPE_CHECKING:
    from srv_kernels.cpu.native_linear import GGUFWeight

Kernel: TypeAlias = Callable[[Tensor], Tensor]
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
    makers, name = _makers()
    packed = 0
    with torch.no_grad():
        for layer in op_layers(model):
            if layer.op not in makers or layer.dtype not in _DTYPES:
                continue
            layer.kernel = makers[layer.op](layer)
            if not layer.tied:
                layer.release()
            packed += 1
    return packed, name


def _makers() -> tuple[Mapping[str, MakeKernel], str]:
    """The functions that make a kernel for a layer, by its op; and a name for the log."""
    if load().library is not None:
        return NativeKernels().makers(), f"native kernels, {load().isa}"
    if packing_available():
        return {"linear": lambda layer: PackedKernel(**layer.operands()[0])}, "oneDNN"
    return {}, "torch's default kernels"


class NativeKernels:
    """Makes the kernels of the native library for the layers of one model, whose packed weights share an arena."""

    def __init__(self) -> None:
        from srv_kernels.cpu import native_linear

        self._library, self._arena = native_linear, HugePageArena()
        self._blocks: dict[int, GGUFWeight] = {}  # by the id of the rows, which a tied layer shares with another one

    def makers(self) -> Mapping[str, MakeKernel]:
        return {
            "linear": self._linear,
            "linear_int8": partial(self._int8, self._library.Int8WeightLinear),
            "linear_w8a8": partial(self._int8, self._library.W8A8Linear),
            "linear_w8a8_static": self._static,
            "linear_gguf": self._gguf,
            "rows_gguf": self._gguf_rows,
        }

    def _linear(self, layer: OpLayer) -> Kernel:
        return self._library.linear(**layer.operands()[0], arena=self._arena)

    def _int8(self, kind: Callable[..., Kernel], layer: OpLayer) -> Kernel:
        (operands,) = layer.operands()
        return kind(operands["weight"], operands["weight_scale"], operands["bias"], arena=self._arena)

    def _static(self, layer: OpLayer) -> Kernel:
        (operands,) = layer.operands()
        return self._library.W8A8Linear(
            operands["weight"],
            operands["deq_scale"],
            int32_bias=operands["quant_bias"],
            static=(1.0 / float(operands["input_scale"]), float(operands["input_offset"])),
            arena=self._arena,
        )

    def _gguf(self, layer: OpLayer) -> Kernel:
        return self._library.FusedGGUFLinear(self._packed_blocks(layer), layer.added_bias)

    def _gguf_rows(self, layer: OpLayer) -> Kernel:
        (weight,) = self._packed_blocks(layer)
        return partial(weight.rows, dtype=layer.dtype)

    def _packed_blocks(self, layer: OpLayer) -> list[GGUFWeight]:
        """The packed weights of a layer's matrices; each matrix is packed once."""
        weights: list[GGUFWeight] = []
        for operands in layer.operands():
            rows = operands["rows"]
            if id(rows) not in self._blocks:
                packed = self._library.GGUFWeight(rows, operands["quant_type"], layer.inputs, self._arena)
                self._blocks[id(rows)] = packed
            weights.append(self._blocks[id(rows)])
        return weights
