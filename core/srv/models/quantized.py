"""Linear layers whose weights are 8-bit integers, their inputs rounded to 8 bits on the way in (W8A8), or not.

Owns the tensors of each scheme, and what must hold of them once they are loaded. The arithmetic is that of ops:
`linear_w8a8` and `linear_w8a8_static`, which a platform with the capability "w8a8" brings, and `linear_int8` of the
capability "int8_weights". Which layer is stored in which way is for `srv.models.modelslim` and `srv.models.int8`; how
stored tensors become these, for `srv.models.storage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from srv.models import int8, modelslim
from srv.models.layers import Linear, Place, Projection, Weights
from srv.models.modelslim import Description


class ScaledInt8Linear(Projection):
    """y = x Wᵀ + b, with W = weight · weight_scale, by the op `op`.

    weight int8 [out, in], weight_scale float32 [out], bias [out] of `dtype`, the model's, or None.
    """

    op: ClassVar[str]

    def __init__(self, place: Place, parts: Mapping[str, int], inputs: int, bias: bool) -> None:
        super().__init__(parts)
        self.dtype = place.dtype
        outputs = sum(parts.values())
        self.weight = place.empty(outputs, inputs, dtype=torch.int8)
        self.weight_scale = place.empty(outputs, dtype=torch.float32)
        self.bias = place.empty(outputs) if bias else None
        self._multiply = place.bind(self.op, inputs=inputs, outputs=outputs)
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: the platform's op on the weight as it was loaded."""
        return self._multiply(x, self.weight, self.weight_scale, self.bias)

    def targets(self) -> dict[str, Tensor]:
        targets = self.sliced("weight", self.weight)
        targets |= self.sliced("weight_scale", self.weight_scale.unsqueeze(1))
        return targets if self.bias is None else targets | self.sliced("bias", self.bias)


class DynamicInt8Linear(ScaledInt8Linear):
    """Each row of x is rounded to 8 bits by its own largest magnitude.

    `offset`: stored beside a weight is an offset of each row's zero, which must be 0: a symmetric weight.
    """

    op = "linear_w8a8"

    def __init__(
        self, place: Place, parts: Mapping[str, int], inputs: int, bias: bool, *, offset: bool = False
    ) -> None:
        super().__init__(place, parts, inputs, bias)
        self._offset = torch.empty(sum(parts.values()) if offset else 0, dtype=torch.float32)

    def targets(self) -> dict[str, Tensor]:
        if not self._offset.numel():
            return super().targets()
        return super().targets() | self.sliced("weight_offset", self._offset.unsqueeze(1))

    def settle(self) -> str | None:
        if not self._offset.numel():
            return None
        moved = [name for name, offset in self.sliced("weight_offset", self._offset).items() if bool(offset.any())]
        return f"{moved[0]} is not 0, and weights are multiplied symmetrically around 0" if moved else None


class WeightOnlyInt8Linear(ScaledInt8Linear):
    """x keeps its dtype."""

    op = "linear_int8"


class StaticInt8Linear(Projection):
    """y = (round(x / input_scale + input_offset) weightᵀ + quant_bias) · deq_scale.

    weight int8 [out, in]; input_scale, input_offset float32 [1], chosen when the checkpoint was made; quant_bias
    int32 [out], which holds the bias and what the offset adds; deq_scale float32 [out]. Parts that lie in one matrix
    see one input, so that they must agree on its scale and offset.
    """

    def __init__(self, place: Place, parts: Mapping[str, int], inputs: int) -> None:
        super().__init__(parts)
        self.dtype = place.dtype
        outputs = sum(parts.values())
        self.weight = place.empty(outputs, inputs, dtype=torch.int8)
        self.quant_bias = place.empty(outputs, dtype=torch.int32)
        self.deq_scale = place.empty(outputs, dtype=torch.float32)
        self._scales, self._offsets = (place.empty(len(parts), dtype=torch.float32) for _ in range(2))
        self._multiply = place.bind("linear_w8a8_static", inputs=inputs, outputs=outputs)
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

    def targets(self) -> dict[str, Tensor]:
        targets = self.sliced("weight", self.weight)
        targets |= self.sliced("quant_bias", self.quant_bias) | self.sliced("deq_scale", self.deq_scale)
        for index, name in enumerate(self.parts):
            targets[f"{name}.input_scale"] = self._scales[index : index + 1]
            targets[f"{name}.input_offset"] = self._offsets[index : index + 1]
        return targets

    def settle(self) -> str | None:
        for suffix, values in (("input_scale", self._scales), ("input_offset", self._offsets)):
            told = values.tolist()
            if any(value != told[0] for value in told):
                each = ", ".join(f"{name}.{suffix} = {value:g}" for name, value in zip(self.parts, told, strict=True))
                return f"parts of one matrix round their common input differently ({each})"
        scale = float(self._scales[0])
        return None if scale > 0 else f"{next(iter(self.parts))}.input_scale is {scale:g}, not above 0"


class DescribedWeights(Weights):
    """Each layer in the kind that the checkpoint's description names; embeddings are plain.

    `offsets`: offsets are stored beside the weights of the kind W8A8_DYNAMIC.
    """

    def __init__(self, place: Place, description: Description, *, offsets: bool) -> None:
        super().__init__(place)
        self._description, self._offsets = description, offsets

    def linear(self, parts: Mapping[str, int], inputs: int, bias: bool) -> Projection:
        kind = self._description.kind(parts)
        if kind == modelslim.STATIC:
            return StaticInt8Linear(self.place, parts, inputs)  # a bias is part of what it stores
        if kind == modelslim.DYNAMIC:
            return DynamicInt8Linear(self.place, parts, inputs, bias, offset=self._offsets)
        return super().linear(parts, inputs, bias)


class RoundedWeights(Weights):
    """The projections of layers in 8 bits, of class `kind`; embeddings and the output layer are plain."""

    def __init__(self, place: Place, kind: type[ScaledInt8Linear]) -> None:
        super().__init__(place)
        self._kind = kind

    def linear(self, parts: Mapping[str, int], inputs: int, bias: bool) -> Projection:
        kind = self._kind if all(map(int8.rounded_at_load, parts)) else Linear
        return kind(self.place, parts, inputs, bias)
