"""The layers of checkpoints of 4-bit weights in groups.

No platform has an op for them, so they have a kernel of their own: it dequantizes the matrix, and multiplies by it with
torch's `linear`. That saves memory, not time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory, Unit
from srv.models.layers.linear import Projection, Split
from srv.quantization.method import StoredModel
from srv_example_models.int4_groups import group_size, schemes


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 [out, in / 2], float32 [out, groups] -> float32 [out, in]."""
    stored = torch.stack((packed & 15, packed >> 4), -1)  # [out, in / 2, 2]
    groups = stored.reshape(*scale.shape, -1).to(torch.float32) - 8
    return (groups * scale.unsqueeze(-1)).flatten(1)


class Int4Linear(Projection):
    """y = x Wᵀ + b with W = dequantize(packed, scale); bias [out] of `dtype` (the model's), or None."""

    def __init__(
        self, context: BuildContext, output_sizes: Mapping[str, int], inputs: int, bias: bool, group_size: int
    ) -> None:
        super().__init__(context.dtype, output_sizes, inputs)
        outputs = sum(output_sizes.values())
        self.packed = context.empty(outputs, inputs // 2, dtype=torch.uint8)
        self.scale = context.empty(outputs, inputs // group_size, dtype=torch.float32)
        self.bias = context.empty(outputs) if bias else None
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantize(self.packed, self.scale).to(x.dtype), self.bias)

    def weight_views(self) -> dict[str, Tensor]:
        views = self.part_views("weight_packed", self.packed) | self.part_views("weight_scale", self.scale)
        return views if self.bias is None else views | self.part_views("bias", self.bias)

    def validate_loaded(self) -> str | None:
        for name, scale in self.part_views("weight_scale", self.scale).items():
            if not bool(scale.isfinite().all()):
                return f"{name} has values that are not finite"
        return None


class Int4LayerFactory(LayerFactory):
    """Quantized linear layers where the checkpoint has packed weights; all other layers are those of `srv`."""

    def __init__(self, context: BuildContext, model: StoredModel) -> None:
        super().__init__(context)
        self._schemes, self._group_size = schemes(model), group_size(model.facts)

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: Unit = 1
    ) -> Projection:
        if self._schemes(tuple(output_sizes), inputs, False) is None:
            return super().linear(output_sizes, inputs, bias, split, unit)
        return Int4Linear(self.context, output_sizes, inputs, bias, self._group_size)
