"""Experts with int8 weights, and the conditions on their loaded values.

The arithmetic is that of the op `experts_int8`, which may quantize its inputs to int8 too. Must not know which method
uses it, nor how its checkpoints store the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.quantization.int8_checks import EXPERTS_REMEDY
from srv.quantization.int8_layers import NO_SCALES, all_zero


def unsupported_experts(prefix: str, reason: str, remedy: str = EXPERTS_REMEDY) -> ModelError:
    """The refusal of experts that a method of int8 does not cover; by default, of those of a checkpoint."""
    return ModelError("unsupported_quantization", prefix, reason, remedy)


class Int8Experts(ExpertWeights):
    """gate_up int8 [E, 2 I, H] with gate_up_scale float32 [E, 2 I], and down int8 [E, H, I] with down_scale [E, H].

    `offset`: the checkpoint also stores a zero point per row, `weight_offset`. All of them must be 0.
    """

    op = "experts_int8"

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes, *, offset: bool = False) -> None:
        super().__init__(context, prefix, sizes)
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.intermediate
        self.gate_up = context.empty(experts, 2 * inner, hidden, dtype=torch.int8)
        self.down = context.empty(experts, hidden, inner, dtype=torch.int8)
        self.gate_up_scale = context.empty(experts, 2 * inner, dtype=torch.float32)
        self.down_scale = context.empty(experts, hidden, dtype=torch.float32)
        self._offsets: dict[str, Tensor] = {}
        if offset:
            first, second = torch.empty(experts, 2 * inner, 1), torch.empty(experts, hidden, 1)
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
        return {}

    def validate_loaded(self) -> str | None:
        nonzero = next((name for name, offset in self._offsets.items() if bool(offset.any())), None)
        if nonzero is not None:
            return f"{nonzero} is not 0, and srv supports only weights quantized symmetrically"
        views = self.weight_views()
        scales = {name: view for name, view in views.items() if name.endswith("_scale")}
        zero = (name for name, scale in scales.items() if all_zero(scale, views[name.removesuffix("_scale")]))
        return next((f"{name} {NO_SCALES}" for name in zero), None)
