"""Layers with FP8 weights: linear layers and experts.

The arithmetic is that of the ops `linear_fp8` and `experts_fp8`. Must not know checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LocalSizes
from srv.models.layers.linear import Projection
from srv.quantization.schemes import SCALE, Fp8


class Fp8Matrix(NamedTuple):
    """weight float8_e4m3fn [outputs, inputs], and scale float32, of one or several layers of the checkpoint."""

    weight: Tensor
    scale: Tensor
    outputs: int


class Fp8Linear(Projection):
    """y = x Wᵀ + b, with W = weight times the scale of each block.

    Layers that are fused are one matrix, unless they have blocks and one of them does not end with a whole block: the
    next one then begins another matrix. bias [out] of `dtype` (the model's), or None.
    """

    op = "linear_fp8"

    def __init__(self, context: BuildContext, local: LocalSizes, bias: bool, scheme: Fp8) -> None:
        super().__init__(context.dtype, *local)
        outputs, inputs = local.outputs, local.inputs
        self._blocks = scheme.block_of(inputs)
        self._has_column_blocks = scheme.block is not None
        self._runs = list(scheme.runs(local.output_sizes))
        self.matrices = [self._matrix(context, sum(run.values()), scheme) for run in self._runs]
        self._loaded_bias = context.empty(outputs) if bias else None
        self.bias = self._loaded_bias if self.sharding.adds_bias else None
        self._multiply = context.bind(self.op, inputs=inputs, outputs=outputs)
        self.implementation = context.name_of(self.op, inputs=inputs, outputs=outputs)
        self.kernel = self.multiply

    def _matrix(self, context: BuildContext, outputs: int, scheme: Fp8) -> Fp8Matrix:
        weight = context.empty(outputs, self.inputs, dtype=torch.float8_e4m3fn)
        scale = context.empty(*scheme.scale_shape(outputs, self.inputs), dtype=torch.float32)
        return Fp8Matrix(weight, scale, outputs)

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on each matrix as it was loaded."""
        results = [self._multiply(x, *operands.values()) for operands in self.operands()]
        return results[0] if len(results) == 1 else torch.cat(results, -1)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        sizes = [matrix.outputs for matrix in self.matrices]
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, sizes)
        blocks = dict(zip(("block_outputs", "block_inputs"), self._blocks, strict=True))
        return tuple(
            {"weight": matrix.weight, "scale": matrix.scale, "bias": part, **blocks}
            for matrix, part in zip(self.matrices, biases, strict=True)
        )

    def weight_tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for matrix in self.matrices for tensor in (matrix.weight, matrix.scale))

    def weight_views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for matrix, run in zip(self.matrices, self._runs, strict=True):
            scales = [-(-outputs // self._blocks[0]) for outputs in run.values()]
            for suffix, fused, sizes in (("weight", matrix.weight, run.values()), (SCALE, matrix.scale, scales)):
                parts = zip(run, torch.split(fused, list(sizes)), strict=True)
                views |= {f"{name}.{suffix}": view for name, view in parts}
        return views if self._loaded_bias is None else views | self.part_views("bias", self._loaded_bias)

    def weight_slices(self) -> dict[str, Slice]:
        """Those of scales are in blocks: of columns, too, unless all inputs of an output share one."""
        slices, (rows, columns) = super().weight_slices(), self._blocks
        cut = self.sharding.columns if self._has_column_blocks else None
        for name in self.output_sizes:
            scale = f"{name}.{SCALE}"
            if scale in slices:
                slices[scale] = slices[scale].scaled(1, rows)
            elif cut is not None:
                slices[scale] = cut.scaled(1, columns)
        return slices


class Fp8Experts(ExpertWeights):
    """gate_up float8_e4m3fn [E, 2 I, H] and down [E, H, I], with float32 scales of their blocks.

    gate_up_scale has the rows of the gate's scales, then those of the up projection. With biases gate_up_bias [E, 2 I]
    and down_bias [E, H] of `dtype`, or without.
    """

    op = "experts_fp8"

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes, scheme: Fp8, bias: bool = False) -> None:
        super().__init__(context, prefix, sizes)
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.local
        self._blocks = scheme.block_of(max(hidden, inner))
        self._has_column_blocks = scheme.block is not None
        self.gate_up = context.empty(experts, sizes.first_rows, hidden, dtype=torch.float8_e4m3fn)
        self.down = context.empty(experts, hidden, inner, dtype=torch.float8_e4m3fn)
        rows, columns = scheme.scale_shape(inner, hidden)
        self.gate_up_scale = context.empty(experts, len(sizes.first) * rows, columns, dtype=torch.float32)
        self.down_scale = context.empty(experts, *scheme.scale_shape(hidden, inner), dtype=torch.float32)
        self.gate_up_bias = context.empty(experts, sizes.first_rows) if bias else None
        self._loaded_down_bias = context.empty(experts, hidden) if bias else None
        self.down_bias = self._loaded_down_bias if sizes.adds_biases else None

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._compute(x, ids, weights, *self.operands()[0].values())

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        matrices = {name: getattr(self, name) for name in ("gate_up", "gate_up_scale", "down", "down_scale")}
        blocks = dict(zip(("block_outputs", "block_inputs"), self._blocks, strict=True))
        biases = {name: getattr(self, name) for name in ("gate_up_bias", "down_bias")}
        return ({**matrices, **blocks, "activation": self.sizes.activation, **biases},)

    def weight_tensors(self) -> tuple[Tensor, ...]:
        return self.gate_up, self.gate_up_scale, self.down, self.down_scale

    def weight_views(self) -> dict[str, Tensor]:
        views = self.matrix_views("weight", self.gate_up, self.down)
        views |= self.matrix_views(SCALE, self.gate_up_scale, self.down_scale)
        if self.gate_up_bias is None or self._loaded_down_bias is None:
            return views
        return views | self.matrix_views("bias", self.gate_up_bias, self._loaded_down_bias)

    def weight_slices(self) -> dict[str, Slice]:
        rows, columns = self._blocks
        slices = self.row_slices("weight") | self.row_slices(SCALE, rows) | self.column_slices("weight")
        if self._has_column_blocks:
            slices |= self.column_slices(SCALE, 1, columns)
        return slices if self.gate_up_bias is None else slices | self.row_slices("bias")
