"""The layers of w8a8_int8 checkpoints, and the conversion of their tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Tensor

from srv.models.formats.storage import StorageFormat
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection, Split
from srv.models.layers.moe_config import expert_names
from srv.quantization.int8_experts import Int8Experts, unsupported_experts
from srv.quantization.int8_layers import DynamicInt8Linear, check_scales
from srv.quantization.int8_online import BIASES
from srv.quantization.method import StoredModel
from srv.quantization.w8a8_int8 import INT8, read_description

_SCALE = ".weight_scale"


class W8A8LayerFactory(LayerFactory):
    """Int8 layers where the checkpoint stores int8 weights; embeddings are not quantized."""

    def __init__(self, context: BuildContext, model: StoredModel) -> None:
        super().__init__(context)
        self._description = read_description(model)

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: int = 1
    ) -> Projection:
        if self._description.quant_type(output_sizes) == INT8:
            return DynamicInt8Linear(self.context, output_sizes, inputs, bias)
        return super().linear(output_sizes, inputs, bias, split, unit)

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        names = itertools.chain(*expert_names(prefix, sizes.experts))
        if self._description.quant_type(names) != INT8:
            return super().experts(prefix, sizes, bias)
        if bias:
            raise unsupported_experts(prefix, BIASES)
        return Int8Experts(self.context, prefix, sizes)


class W8A8StorageFormat(StorageFormat):
    """One scale per output channel, [out, 1] or [out]."""

    def __init__(self, model: StoredModel) -> None:
        self._path = model.facts.path

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {
            name: (*shape, 1) if name.endswith(_SCALE) and len(shape) == 1 else shape for name, shape in stored.items()
        }

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if not name.endswith(_SCALE):
            return {name: stored}
        check_scales(self._path, name, stored)
        return {name: stored.unsqueeze(1) if stored.dim() == 1 else stored}
