"""Experts that compute with the quantized matrices of a GGUF file directly, by the op `experts_gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights


class GGUFExperts(ExpertWeights):
    """gate_up uint8 [E, 2 I, bytes per row], and down uint8 [E, H, bytes per row], each of one quantization type.

    With biases gate_up_bias [E, 2 I] and down_bias [E, H] of `dtype`, or without; of several ranks, only the first adds
    the biases of down_proj.
    """

    op = "experts_gguf"

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        sizes: ExpertSizes,
        gate_up_type: str,
        down_type: str,
        bias: bool = False,
    ) -> None:
        super().__init__(context, prefix, sizes)
        self.gate_up_type, self.down_type = gate_up_type, down_type
        self.gate_up = self._empty(context, 2 * sizes.local, sizes.hidden, gate_up_type)
        self.down = self._empty(context, sizes.hidden, sizes.local, down_type)
        self.gate_up_bias = context.empty(sizes.experts, 2 * sizes.local) if bias else None
        self._loaded_down_bias = context.empty(sizes.experts, sizes.hidden) if bias else None
        first = sizes.share is None or sizes.share.begin == 0
        self.down_bias = self._loaded_down_bias if first else None

    def _empty(self, context: BuildContext, rows: int, columns: int, quant_type: str) -> Tensor:
        kind = TYPES_BY_NAME[quant_type]
        shape = self.sizes.experts, rows, columns // kind.elements * kind.size
        return torch.empty(shape, dtype=torch.uint8, device=context.device)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._compute(x, ids, weights, *self.operands()[0].values())

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        matrices = {name: getattr(self, name) for name in ("gate_up", "gate_up_type", "down", "down_type")}
        biases = {name: getattr(self, name) for name in ("gate_up_bias", "down_bias")}
        return ({**matrices, "activation": self.sizes.activation, **biases},)

    def weight_views(self) -> dict[str, Tensor]:
        views = self.matrix_views("weight", self.gate_up, self.down)
        if self.gate_up_bias is not None and self._loaded_down_bias is not None:
            views |= self.matrix_views("bias", self.gate_up_bias, self._loaded_down_bias)
        return views

    def weight_slices(self) -> dict[str, Slice]:
        """Slices of columns are in stored bytes, as the rows are."""
        kind = TYPES_BY_NAME[self.down_type]
        slices = self.row_slices("weight") | self.column_slices("weight", kind.size, kind.elements)
        return slices if self.gate_up_bias is None else slices | self.row_slices("bias")
