"""Linear layers on weights that are repacked once after loading, by the native kernels or otherwise by oneDNN.

Native kernels read a weight sequentially, at 32 GB/s; oneDNN reads its blocked layout at 12 GB/s (one row, bfloat16,
two Zen 4 cores, all weights of a model in turn, so that none is in the caches). Without native kernels the blocked
layout is still faster than `F.linear` on a plain matrix. Its operators are those that torch's compiler emits for frozen
weights; if torch lacks them, or for other dtypes, the default kernel stays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from srv.models.layers.linear import Linear, Projection
from srv.quantization.gguf_layers import GGUFEmbedding, GGUFLinear
from srv.quantization.int8_layers import ScaledInt8Linear, StaticInt8Linear, WeightOnlyInt8Linear
from srv_kernels.cpu.huge_page_arena import HugePageArena
from srv_kernels.cpu.library import load

if TYPE_CHECKING:
    from srv_kernels.cpu.native_linear import GGUFWeight

Kernel: TypeAlias = Callable[[Tensor], Tensor]
MakeKernel: TypeAlias = Callable[[Tensor, Tensor | None], Kernel]
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
    """Repack the weights of all linear layers, and free the originals except tied embeddings.

    Returns the number of repacked weights and the name of the kernels.
    """
    arena = HugePageArena()
    kernel, name = _kernel(arena)
    packed = 0
    blocks: dict[int, GGUFWeight] = {}  # by the id of the matrix that they were packed from
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (GGUFEmbedding, GGUFLinear)):
                packed += _pack_blocks(module, blocks, arena)
                continue
            if not isinstance(module, Projection) or (packed_kernel := _packed(module, kernel, arena)) is None:
                continue
            module.kernel = packed_kernel
            if not (isinstance(module, Linear) and module.tied):
                module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)
            packed += 1
    return packed, name


def _pack_blocks(module: GGUFEmbedding | GGUFLinear, known: dict[int, GGUFWeight], arena: HugePageArena) -> bool:
    """Repack GGUF-quantized weights, tied ones only once. False: the default kernel stays."""
    from srv_kernels.cpu.native_library import DTYPE_IDS
    from srv_kernels.cpu.native_linear import FusedGGUFLinear, GGUFWeight

    if module.dtype not in DTYPE_IDS:
        return False
    matrices = [module.matrix] if isinstance(module, GGUFEmbedding) else module.matrices
    for matrix in matrices:
        if id(matrix) not in known:
            known[id(matrix)] = GGUFWeight(matrix.rows, matrix.quant_type, matrix.inputs, arena)
            matrix.release()
    weights = [known[id(matrix)] for matrix in matrices]
    if isinstance(module, GGUFEmbedding):
        module.kernel = partial(weights[0].rows, dtype=module.dtype)
    else:
        module.kernel = FusedGGUFLinear(weights, module.bias)
    return True


def _packed(projection: Projection, kernel: MakeKernel | None, arena: HugePageArena) -> Kernel | None:
    """The kernel on a repacked weight, or None if the default kernel stays."""
    if isinstance(projection, Linear):
        if kernel is None or projection.weight.dtype not in _DTYPES:
            return None
        return kernel(projection.weight, projection.bias)
    if load().library is None or not isinstance(projection, (ScaledInt8Linear, StaticInt8Linear)):
        return None
    from srv_kernels.cpu.native_library import DTYPE_IDS
    from srv_kernels.cpu.native_linear import Int8WeightLinear, W8A8Linear

    if projection.dtype not in DTYPE_IDS:
        return None
    if isinstance(projection, ScaledInt8Linear):
        kind = Int8WeightLinear if isinstance(projection, WeightOnlyInt8Linear) else W8A8Linear
        return kind(projection.weight, projection.weight_scale, projection.bias, arena=arena)
    static = (1.0 / float(projection.input_scale), float(projection.input_offset))
    int32_bias = projection.quant_bias
    return W8A8Linear(projection.weight, projection.deq_scale, int32_bias=int32_bias, static=static, arena=arena)


def _kernel(arena: HugePageArena) -> tuple[MakeKernel | None, str]:
    """A factory of kernels from a weight and a bias, or None if the default stays; and a name for the log."""
    if load().library is not None:
        from srv_kernels.cpu import native_linear

        return partial(native_linear.linear, arena=arena), f"native kernels, {load().isa}"
    if packing_available():
        return PackedKernel, "oneDNN"
    return None, "torch's default kernels"
