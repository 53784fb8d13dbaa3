"""Linear layers and experts with int8 weights, with or without int8 activations (W8A8 or weight-only).

Owns the tensors of each scheme, and the conditions on their loaded values. The arithmetic is that of ops:
`linear_w8a8` and `linear_w8a8_static`, which a platform with the capability "w8a8" provides, and `linear_int8` of the
capability "int8_weights"; `experts_int8` may quantize its inputs to int8, too. Must not know which method uses which
layer, nor how its checkpoints store the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from srv.errors import ModelError
from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LocalSizes
from srv.models.layers.linear import Projection
from srv.quantization.method import DOWNLOAD_REMEDY


def check_finite(path: str, name: str, stored: Tensor) -> None:
    """Refuse numbers of a checkpoint that are not finite. Raises ModelError."""
    if not bool(stored.isfinite().all()):
        raise ModelError("damaged", path, f"a number in {name} is not finite", DOWNLOAD_REMEDY)


def check_scales(path: str, name: str, stored: Tensor) -> None:
    """Refuse scales that are not finite, or negative. Raises ModelError.

    A scale may be 0: tools that divide the largest magnitude of a row by 127 store it for a row of zeros, and one of
    float16 that is too small.
    """
    check_finite(path, name, stored)
    if bool((stored < 0).any()):
        raise ModelError("damaged", path, f"a scale in {name} is negative", DOWNLOAD_REMEDY)


def all_zero(scales: Tensor, weight: Tensor) -> bool:
    """Whether every scale of a layer is 0 though its integers are not: as if the scales had not been written."""
    return not bool(scales.any()) and bool(weight.any())


NO_SCALES = "is 0 for all of its outputs, but its integers are not"


class ScaledInt8Linear(Projection):
    """y = x Wᵀ + b with W = weight · weight_scale, computed by the op of a subclass.

    weight int8 [out, in], weight_scale float32 [out]; bias [out] of `dtype` (the model's), or None.
    """

    def __init__(self, context: BuildContext, local: LocalSizes, bias: bool) -> None:
        super().__init__(context.dtype, *local)
        outputs, inputs = local.outputs, local.inputs
        self.weight = context.empty(outputs, inputs, dtype=torch.int8)
        self.weight_scale = context.empty(outputs, dtype=torch.float32)
        self._loaded_bias = context.empty(outputs) if bias else None
        self.bias = self._loaded_bias if self.sharding.adds_bias else None
        self._multiply = context.bind(self.op, inputs=inputs, outputs=outputs)
        self.implementation = context.name_of(self.op, inputs=inputs, outputs=outputs)
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on the weight as it was loaded."""
        return self._multiply(x, self.weight, self.weight_scale, self.bias)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return ({"weight": self.weight, "weight_scale": self.weight_scale, "bias": self.bias},)

    def weight_tensors(self) -> tuple[Tensor, ...]:
        return self.weight, self.weight_scale

    def weight_views(self) -> dict[str, Tensor]:
        views = self.part_views("weight", self.weight)
        views |= self.part_views("weight_scale", self.weight_scale.unsqueeze(1))
        return views if self._loaded_bias is None else views | self.part_views("bias", self._loaded_bias)

    def validate_loaded(self) -> str | None:
        return _without_scales(self, "weight_scale", self.weight_scale)


class DynamicInt8Linear(ScaledInt8Linear):
    """W8A8 with dynamic per-token activation scales: each row of x is quantized by its own largest magnitude.

    `offset`: the checkpoint also stores a zero point per output channel, `weight_offset`. All of them must be 0,
    because the op multiplies symmetrically quantized weights.
    """

    op = "linear_w8a8"

    def __init__(self, context: BuildContext, local: LocalSizes, bias: bool, *, offset: bool = False) -> None:
        super().__init__(context, local, bias)
        self._offset = torch.empty(local.outputs if offset else 0, dtype=torch.float32)

    def weight_views(self) -> dict[str, Tensor]:
        if not self._offset.numel():
            return super().weight_views()
        return super().weight_views() | self.part_views("weight_offset", self._offset.unsqueeze(1))

    def validate_loaded(self) -> str | None:
        if (refused := super().validate_loaded()) is not None or not self._offset.numel():
            return refused
        offsets = self.part_views("weight_offset", self._offset)
        nonzero = [name for name, offset in offsets.items() if bool(offset.any())]
        return f"{nonzero[0]} is not 0, and srv supports only weights quantized symmetrically" if nonzero else None


class WeightOnlyInt8Linear(ScaledInt8Linear):
    """Weight-only quantization: x keeps its dtype."""

    op = "linear_int8"


class StaticInt8Linear(Projection):
    """W8A8 with static activation scales: y = (round(x / input_scale + input_offset) weightᵀ + quant_bias) · deq_scale.

    weight int8 [out, in]; input_scale, input_offset float32 [1], chosen when the checkpoint was made; quant_bias
    int32 [out], which contains the bias and the correction for the offset; deq_scale float32 [out]. The fused
    layers have the same input, so they must agree on its scale and offset. Of ranks that hold columns, the first one
    adds the whole `quant_bias`, and the others zeros.
    """

    op = "linear_w8a8_static"

    def __init__(self, context: BuildContext, local: LocalSizes) -> None:
        super().__init__(context.dtype, *local)
        outputs, inputs = local.outputs, local.inputs
        self.weight = context.empty(outputs, inputs, dtype=torch.int8)
        self._loaded_bias = context.empty(outputs, dtype=torch.int32)
        added_once = self.sharding.adds_bias
        self.quant_bias = self._loaded_bias if added_once else nn.Parameter(torch.zeros_like(self._loaded_bias), False)
        self.deq_scale = context.empty(outputs, dtype=torch.float32)
        # One value per fused layer is loaded, and the first one is used.
        self._scales, self._offsets = (context.empty(len(local.output_sizes), dtype=torch.float32) for _ in range(2))
        self._multiply = context.bind(self.op, inputs=inputs, outputs=outputs)
        self.implementation = context.name_of(self.op, inputs=inputs, outputs=outputs)
        self.kernel = self.multiply

    @property
    def input_scale(self) -> Tensor:
        """float32 [1]."""
        return self._scales[:1]

    @property
    def input_offset(self) -> Tensor:
        """float32 [1]."""
        return self._offsets[:1]

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on the weight as it was loaded."""
        return self._multiply(x, self.weight, self.input_scale, self.input_offset, self.quant_bias, self.deq_scale)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        names = ("weight", "input_scale", "input_offset", "quant_bias", "deq_scale")
        return ({name: getattr(self, name) for name in names},)

    def weight_tensors(self) -> tuple[Tensor, ...]:
        return self.weight, self.deq_scale

    def weight_views(self) -> dict[str, Tensor]:
        views = self.part_views("weight", self.weight)
        views |= self.part_views("quant_bias", self._loaded_bias) | self.part_views("deq_scale", self.deq_scale)
        for index, name in enumerate(self.output_sizes):
            views[f"{name}.input_scale"] = self._scales[index : index + 1]
            views[f"{name}.input_offset"] = self._offsets[index : index + 1]
        return views

    def weight_slices(self) -> dict[str, Slice]:
        """All ranks have the whole scale and offset of the input."""
        whole = (".input_scale", ".input_offset")
        return {name: part for name, part in super().weight_slices().items() if not name.endswith(whole)}

    def validate_loaded(self) -> str | None:
        for suffix, loaded in (("input_scale", self._scales), ("input_offset", self._offsets)):
            values = loaded.tolist()
            if any(value != values[0] for value in values):
                differences = ", ".join(
                    f"{name}.{suffix} = {value:g}" for name, value in zip(self.output_sizes, values, strict=True)
                )
                return f"layers that share one input quantize it differently ({differences})"
        scale = float(self._scales[0])
        if scale <= 0:
            return f"{next(iter(self.output_sizes))}.input_scale is {scale:g}, which is not above 0"
        return _without_scales(self, "deq_scale", self.deq_scale)


class BiasedLinear(Projection):
    """y = inner(x) + b, for a layer whose op takes no bias. bias [out] of `dtype` (the model's)."""

    def __init__(self, context: BuildContext, inner: Projection) -> None:
        super().__init__(context.dtype, inner.output_sizes, inner.inputs, inner.sharding)
        self.inner = inner
        self._loaded_bias = context.empty(sum(inner.output_sizes.values()))
        self.bias = self._loaded_bias if self.sharding.adds_bias else None
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        product = self.inner.kernel(x)
        return product if self.bias is None else product + self.bias

    def weight_views(self) -> dict[str, Tensor]:
        return self.inner.weight_views() | self.part_views("bias", self._loaded_bias)

    def weight_slices(self) -> dict[str, Slice]:
        biases = {name: part for name, part in super().weight_slices().items() if name.endswith(".bias")}
        return self.inner.weight_slices() | biases


def _without_scales(layer: ScaledInt8Linear | StaticInt8Linear, suffix: str, scales: Tensor) -> str | None:
    parts = zip(
        layer.part_views(suffix, scales).items(), layer.part_views("weight", layer.weight).values(), strict=True
    )
    return next((f"{name} {NO_SCALES}" for (name, part), weight in parts if all_zero(part, weight)), None)


class Int8Experts(ExpertWeights):
    """gate_up int8 [E, 2 I, H] with gate_up_scale float32 [E, 2 I], and down int8 [E, H, I] with down_scale [E, H].

    `offset`: the checkpoint also stores a zero point per row, `weight_offset`. All of them must be 0.
    """

    op = "experts_int8"

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes, *, offset: bool = False) -> None:
        super().__init__(context, prefix, sizes)
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.local
        self.gate_up = context.empty(experts, sizes.first_rows, hidden, dtype=torch.int8)
        self.down = context.empty(experts, hidden, inner, dtype=torch.int8)
        self.gate_up_scale = context.empty(experts, sizes.first_rows, dtype=torch.float32)
        self.down_scale = context.empty(experts, hidden, dtype=torch.float32)
        self._offsets: dict[str, Tensor] = {}
        if offset:
            first, second = torch.empty(experts, sizes.first_rows, 1), torch.empty(experts, hidden, 1)
            self._offsets = self.matrix_views("weight_offset", first, second)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._compute(
            x, ids, weights, self.gate_up, self.gate_up_scale, self.down, self.down_scale, self.sizes.activation
        )

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        names = ("gate_up", "gate_up_scale", "down", "down_scale")
        return ({**{name: getattr(self, name) for name in names}, "activation": self.sizes.activation},)

    def weight_tensors(self) -> tuple[Tensor, ...]:
        return self.gate_up, self.gate_up_scale, self.down, self.down_scale

    def weight_views(self) -> dict[str, Tensor]:
        views = self.matrix_views("weight", self.gate_up, self.down)
        scales = self.gate_up_scale.unsqueeze(-1), self.down_scale.unsqueeze(-1)
        return views | self.matrix_views("weight_scale", *scales) | self._offsets

    def weight_slices(self) -> dict[str, Slice]:
        suffixes = ("weight", "weight_scale", *(("weight_offset",) if self._offsets else ()))
        rows = {name: part for suffix in suffixes for name, part in self.row_slices(suffix).items()}
        return rows | self.column_slices("weight")

    def validate_loaded(self) -> str | None:
        nonzero = next((name for name, offset in self._offsets.items() if bool(offset.any())), None)
        if nonzero is not None:
            return f"{nonzero} is not 0, and srv supports only weights quantized symmetrically"
        views = self.weight_views()
        scales = {name: view for name, view in views.items() if name.endswith("_scale")}
        zero = (name for name, scale in scales.items() if all_zero(scale, views[name.removesuffix("_scale")]))
        return next((f"{name} {NO_SCALES}" for name in zero), None)
