"""Layers with FP8 weights, the conversion of stored tensors, and the quantization of unquantized ones at load.

The arithmetic is that of the ops `linear_fp8` and `experts_fp8`. Must not know which checkpoints have FP8 weights
(`srv.quantization.fp8`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.formats.slices import Slice
from srv.models.formats.storage import StorageFormat, TensorGroups
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.linear import Projection
from srv.quantization.fp8 import (
    DTYPE,
    INPUT_SCALES,
    SCALE,
    squeezed,
)
from srv.quantization.fp8_configs import Fp8Form, scheme_of
from srv.quantization.int8_online import is_quantized
from srv.quantization.method import DOWNLOAD_REMEDY, UP_PROJECTION, StoredModel
from srv.quantization.schemes import Fp8

_LARGEST = 448.0  # of float8_e4m3fn
_NAN = 0x7F  # its code, without the sign


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

    def __init__(
        self, context: BuildContext, output_sizes: Mapping[str, int], inputs: int, bias: bool, scheme: Fp8
    ) -> None:
        super().__init__(context.dtype, output_sizes, inputs)
        self._blocks = _blocks(scheme, inputs)
        self._runs = list(scheme.runs(output_sizes))
        self.matrices = [self._matrix(context, sum(run.values()), scheme) for run in self._runs]
        outputs = sum(output_sizes.values())
        self.bias = context.empty(outputs) if bias else None
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
        sizes = [each.outputs for each in self.matrices]
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, sizes)
        blocks = dict(zip(("block_outputs", "block_inputs"), self._blocks, strict=True))
        return tuple(
            {"weight": each.weight, "scale": each.scale, "bias": part, **blocks}
            for each, part in zip(self.matrices, biases, strict=True)
        )

    def weight_tensors(self) -> tuple[Tensor, ...]:
        return tuple(each for matrix in self.matrices for each in (matrix.weight, matrix.scale))

    def weight_views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for matrix, run in zip(self.matrices, self._runs, strict=True):
            scales = [-(-outputs // self._blocks[0]) for outputs in run.values()]
            for suffix, fused, sizes in (("weight", matrix.weight, run.values()), (SCALE, matrix.scale, scales)):
                parts = zip(run, torch.split(fused, list(sizes)), strict=True)
                views |= {f"{name}.{suffix}": view for name, view in parts}
        return views if self.bias is None else views | self.part_views("bias", self.bias)


def _blocks(scheme: Fp8, inputs: int) -> tuple[int, int]:
    return scheme.block or (1, inputs)


class Fp8Experts(ExpertWeights):
    """gate_up float8_e4m3fn [E, 2 I, H] and down [E, H, I], with float32 scales of their blocks.

    gate_up_scale has the rows of the gate's scales, then those of the up projection. With biases gate_up_bias [E, 2 I]
    and down_bias [E, H] of `dtype`, or without.
    """

    op = "experts_fp8"

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes, scheme: Fp8, bias: bool = False) -> None:
        super().__init__(context, prefix, sizes)
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.intermediate
        self._blocks = _blocks(scheme, max(hidden, inner))
        self.gate_up = context.empty(experts, 2 * inner, hidden, dtype=torch.float8_e4m3fn)
        self.down = context.empty(experts, hidden, inner, dtype=torch.float8_e4m3fn)
        rows, columns = scheme.scale_shape(inner, hidden)
        self.gate_up_scale = context.empty(experts, 2 * rows, columns, dtype=torch.float32)
        self.down_scale = context.empty(experts, *scheme.scale_shape(hidden, inner), dtype=torch.float32)
        self.gate_up_bias = context.empty(experts, 2 * inner) if bias else None
        self.down_bias = context.empty(experts, hidden) if bias else None

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
        if self.gate_up_bias is None or self.down_bias is None:
            return views
        return views | self.matrix_views("bias", self.gate_up_bias, self.down_bias)

    def weight_slices(self) -> dict[str, Slice]:
        return {}


class Fp8StorageFormat(StorageFormat):
    """FP8 weights with scales of any name and shape, which become those of layers; other scales are checked only."""

    def __init__(self, model: StoredModel, scheme: Fp8Form | None = None) -> None:
        """`scheme`: None for the one that the configuration of the checkpoint states."""
        self._path, self._types = model.facts.path, model.types
        self._scheme = scheme or scheme_of(Path(self._path), model.facts.config)
        self._held_as = self._scheme.held
        self._sizes: dict[str, tuple[int, ...]] = {}  # of each FP8 weight, once `shapes` has seen it
        self._dequantized = TensorGroups()

    def parts(self, name: str) -> tuple[str, ...]:
        layer, kind = self._kind(name)
        match kind:
            case "weight" | "input":
                return (f"{layer}.weight",)  # a scale of inputs is read, so that it is checked
            case "scale":
                return (f"{layer}.{'weight' if layer.endswith(UP_PROJECTION) else SCALE}",)
        return (name,)

    def unused(self, names: Collection[str]) -> set[str]:
        return {name for name in names if name == f"lm_head.{SCALE}"}  # of the copy of a tied output layer

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            layer, kind = self._kind(name)
            if kind == "weight":
                self._sizes[layer] = shape
                if len(shape) == 2 and not layer.endswith(UP_PROJECTION):
                    found[f"{layer}.{SCALE}"] = self._held_as.scale_shape(*shape)
            if kind in ("weight", ""):
                found[self.parts(name)[0]] = shape
        return found

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        layer, kind = self._kind(name)
        match kind:
            case "":
                return {name: stored}
            case "weight":
                self._check_weight(name, stored)
                return self._made(layer, "weight", stored)
            case "scale":
                return self._made(layer, SCALE, self._held(layer, self._checked(name, stored, largest=_LARGEST)))
        self._checked(name, stored)
        return {}

    def _made(self, layer: str, suffix: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensor of a layer; of an up-projection, the dequantized weight once weight and scale are there."""
        if not layer.endswith(UP_PROJECTION):
            return {f"{layer}.{suffix}": tensor}
        group = self._dequantized.add(layer, suffix, tensor, count=2)
        return {} if group is None else {f"{layer}.weight": self._widened(group["weight"], group[SCALE])}

    def _widened(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Dequantized in float32."""
        outputs, inputs = weight.shape
        rows, columns = _blocks(self._held_as, inputs)
        wide = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        return weight.float() * wide

    def _kind(self, name: str) -> tuple[str, str]:
        """The layer of a tensor, and what it is: "weight", "scale", "input", or "" for unquantized ones."""
        layer, _, suffix = name.rpartition(".")
        if self._types.get(f"{layer}.{self._scheme.weight}") != DTYPE:
            return layer, ""
        if suffix in self._scheme.scales:
            return layer, "scale"
        if suffix in INPUT_SCALES:
            return layer, "input"
        return layer, "weight" if suffix == self._scheme.weight else ""

    def _check_weight(self, name: str, weight: Tensor) -> None:
        if bool(((weight.view(torch.uint8) & _NAN) == _NAN).any()):
            self._fail("damaged", f"{name} has values that are NaN")

    def _checked(self, name: str, scale: Tensor, largest: float = 1.0) -> Tensor:
        """A scale in float32.

        Raises ModelError unless it consists of finite numbers that are not negative, and stay finite times `largest`.
        """
        wide = scale.float()
        fits = (wide >= 0) & (wide * largest).isfinite()
        if not bool(fits.all()):
            wrong = wide[~fits].flatten()[0].item()
            if math.isfinite(wrong) and wrong > 0:
                self._fail("damaged", f"{name} has the value {wrong:g}, by which a weight of {largest:g} overflows")
            self._fail("damaged", f"{name} has the value {wrong:g}, which is not a finite number from 0 on")
        return wide

    def _held(self, layer: str, scale: Tensor) -> Tensor:
        """A scale with the shape that layers hold."""
        shape = self._held_as.scale_shape(*self._sizes[layer])
        scale = scale.reshape(squeezed(tuple(scale.shape)))
        return scale.reshape(1, 1).expand(shape) if scale.numel() == 1 else scale.reshape(shape)

    def _fail(self, code: str, reason: str) -> NoReturn:
        raise ModelError(code, self._path, reason, DOWNLOAD_REMEDY)


class OnlineFp8StorageFormat(StorageFormat):
    """Unquantized checkpoints whose linear layers are quantized to FP8 while they are loaded."""

    def __init__(self, model: StoredModel) -> None:
        """The format is the same for every model."""

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        layers = {name.removesuffix(".weight"): shape for name, shape in stored.items() if _becomes_fp8(name)}
        return {**stored, **{f"{layer}.{SCALE}": (shape[0], 1) for layer, shape in layers.items()}}

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if not _becomes_fp8(name):
            return {name: stored}
        quantized, scale = quantize_fp8(stored)
        return {name: quantized, f"{name.removesuffix('.weight')}.{SCALE}": scale}


def _becomes_fp8(name: str) -> bool:
    layer, _, suffix = name.rpartition(".")
    return suffix == "weight" and is_quantized(layer)


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 quantization per output: [out, in] -> float8_e4m3fn [out, in], float32 scales [out, 1].

    The largest magnitude of each row becomes 448. A row of zeros has the scale 0.
    """
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / _LARGEST
    scaled = wide / torch.where(scale == 0, 1.0, scale)
    return scaled.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale
