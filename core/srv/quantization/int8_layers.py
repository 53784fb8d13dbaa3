"""Linear layers with int8 weights, with or without int8 activations (W8A8 or weight-only).

Owns the tensors of each scheme, and the conditions on their loaded values. The arithmetic is that of ops:
`linear_w8a8` and `linear_w8a8_static`, which a platform with the capability "w8a8" provides, and `linear_int8` of the
capability "int8_weights". `srv.quantization.modelslim` and `srv.quantization.w8a8_int8` find out which layer uses
which scheme; `srv.quantization.storage` converts stored tensors to the tensors of these layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Linear, Projection, Split
from srv.quantization import modelslim
from srv.quantization import w8a8_int8 as int8
from srv.quantization.modelslim import QuantDescription


class ScaledInt8Linear(Projection):
    """y = x Wᵀ + b with W = weight · weight_scale, computed by the op `op`.

    weight int8 [out, in], weight_scale float32 [out]; bias [out] of `dtype` (the model's), or None.
    """

    op: ClassVar[str]

    def __init__(self, context: BuildContext, output_sizes: Mapping[str, int], inputs: int, bias: bool) -> None:
        super().__init__(output_sizes)
        self.dtype = context.dtype
        outputs = sum(output_sizes.values())
        self.weight = context.empty(outputs, inputs, dtype=torch.int8)
        self.weight_scale = context.empty(outputs, dtype=torch.float32)
        self.bias = context.empty(outputs) if bias else None
        self._multiply = context.bind(self.op, inputs=inputs, outputs=outputs)
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on the weight as it was loaded."""
        return self._multiply(x, self.weight, self.weight_scale, self.bias)

    def weight_views(self) -> dict[str, Tensor]:
        views = self.part_views("weight", self.weight)
        views |= self.part_views("weight_scale", self.weight_scale.unsqueeze(1))
        return views if self.bias is None else views | self.part_views("bias", self.bias)


class DynamicInt8Linear(ScaledInt8Linear):
    """W8A8 with dynamic per-token activation scales: each row of x is quantized by its own largest magnitude.

    `offset`: the checkpoint also stores a zero point per output channel, `weight_offset`. All of them must be 0,
    because the op multiplies symmetrically quantized weights.
    """

    op = "linear_w8a8"

    def __init__(
        self, context: BuildContext, output_sizes: Mapping[str, int], inputs: int, bias: bool, *, offset: bool = False
    ) -> None:
        super().__init__(context, output_sizes, inputs, bias)
        self._offset = torch.empty(sum(output_sizes.values()) if offset else 0, dtype=torch.float32)

    def weight_views(self) -> dict[str, Tensor]:
        if not self._offset.numel():
            return super().weight_views()
        return super().weight_views() | self.part_views("weight_offset", self._offset.unsqueeze(1))

    def validate_loaded(self) -> str | None:
        if not self._offset.numel():
            return None
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
    layers have the same input, so they must agree on its scale and offset.
    """

    def __init__(self, context: BuildContext, output_sizes: Mapping[str, int], inputs: int) -> None:
        super().__init__(output_sizes)
        self.dtype = context.dtype
        outputs = sum(output_sizes.values())
        self.weight = context.empty(outputs, inputs, dtype=torch.int8)
        self.quant_bias = context.empty(outputs, dtype=torch.int32)
        self.deq_scale = context.empty(outputs, dtype=torch.float32)
        # One value per fused layer is loaded, and the first one is used.
        self._scales, self._offsets = (context.empty(len(output_sizes), dtype=torch.float32) for _ in range(2))
        self._multiply = context.bind("linear_w8a8_static", inputs=inputs, outputs=outputs)
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

    def weight_views(self) -> dict[str, Tensor]:
        views = self.part_views("weight", self.weight)
        views |= self.part_views("quant_bias", self.quant_bias) | self.part_views("deq_scale", self.deq_scale)
        for index, name in enumerate(self.output_sizes):
            views[f"{name}.input_scale"] = self._scales[index : index + 1]
            views[f"{name}.input_offset"] = self._offsets[index : index + 1]
        return views

    def validate_loaded(self) -> str | None:
        for suffix, loaded in (("input_scale", self._scales), ("input_offset", self._offsets)):
            values = loaded.tolist()
            if any(value != values[0] for value in values):
                each = ", ".join(
                    f"{name}.{suffix} = {value:g}" for name, value in zip(self.output_sizes, values, strict=True)
                )
                return f"layers that share one input quantize it differently ({each})"
        scale = float(self._scales[0])
        return None if scale > 0 else f"{next(iter(self.output_sizes))}.input_scale is {scale:g}, which is not above 0"


class QuantizedLayerFactory(LayerFactory):
    """The layers of a quantized checkpoint, each by the type in its description; embeddings are not quantized.

    `offsets`: the checkpoint stores `weight_offset` for layers of the type W8A8_DYNAMIC.
    """

    def __init__(self, context: BuildContext, description: QuantDescription, *, offsets: bool) -> None:
        super().__init__(context)
        self._description, self._offsets = description, offsets

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: int = 1
    ) -> Projection:
        quant_type = self._description.quant_type(output_sizes)
        if quant_type == modelslim.STATIC:
            return StaticInt8Linear(self.context, output_sizes, inputs)  # its quant_bias contains the bias
        if quant_type == modelslim.DYNAMIC:
            return DynamicInt8Linear(self.context, output_sizes, inputs, bias, offset=self._offsets)
        return super().linear(output_sizes, inputs, bias, split, unit)


class OnlineInt8LayerFactory(LayerFactory):
    """The layers of a checkpoint that is quantized while it is loaded.

    Linear layers within decoder layers are of `layer_class`; embeddings and the output layer are not quantized.
    """

    def __init__(self, context: BuildContext, layer_class: type[ScaledInt8Linear]) -> None:
        super().__init__(context)
        self._layer_class = layer_class

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: int = 1
    ) -> Projection:
        layer_class = self._layer_class if all(map(int8.is_quantized_online, output_sizes)) else Linear
        return layer_class(self.context, output_sizes, inputs, bias)
