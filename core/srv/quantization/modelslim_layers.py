"""The layers of modelslim checkpoints, and the conversion of their tensors."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from srv.models.checkpoints.storage import StorageFormat
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection, Split
from srv.models.layers.moe_config import expert_names
from srv.quantization import modelslim
from srv.quantization.int8_checks import check_up_projections
from srv.quantization.int8_experts import Int8Experts, unsupported_experts
from srv.quantization.int8_layers import DynamicInt8Linear, StaticInt8Linear, check_finite, check_scales
from srv.quantization.method import StoredModel

# How the names of tensors end that scale others, or shift them.
_SCALES, _OFFSETS = (".weight_scale", ".deq_scale", ".input_scale"), (".weight_offset", ".input_offset")


class ModelslimLayerFactory(LayerFactory):
    """The layers of a checkpoint, each by the type in its description; embeddings are not quantized."""

    def __init__(self, context: BuildContext, model: StoredModel) -> None:
        super().__init__(context)
        self._model = model
        self._description = modelslim.description_of(model)
        check_up_projections(model)

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: int = 1
    ) -> Projection:
        quant_type = modelslim.quant_type(self._model, self._description, tuple(output_sizes), inputs)
        if quant_type == modelslim.STATIC:
            return StaticInt8Linear(self.context, output_sizes, inputs)  # its quant_bias contains the bias
        if quant_type == modelslim.DYNAMIC:
            return DynamicInt8Linear(self.context, output_sizes, inputs, bias, offset=True)
        return super().linear(output_sizes, inputs, bias, split, unit)

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        named = expert_names(prefix, sizes.experts)
        for names, inputs in zip(named, (sizes.hidden, sizes.intermediate), strict=True):
            modelslim.quant_type(self._model, self._description, names, inputs)
        quant_type = self._description.quant_type(itertools.chain(*named))
        if quant_type == modelslim.FLOAT:
            return super().experts(prefix, sizes, bias)
        if quant_type == modelslim.STATIC or bias:
            raise unsupported_experts(prefix, f"its experts are {quant_type}{' with biases' if bias else ''}")
        return Int8Experts(self.context, prefix, sizes, offset=True)


class ModelslimStorageFormat(StorageFormat):
    """The format of modelslim, whose description says which tensors are redundant.

    Checkpoints for float16 store `deq_scale` as int64 [out] whose lower 32 bits are those of a float32, because one
    kernel takes it so. `input_offset` is a whole number that may have any dtype.
    """

    def __init__(self, model: StoredModel) -> None:
        self._path = model.facts.path
        self._description = modelslim.description_of(model)

    def unused(self, names: Collection[str]) -> set[str]:
        return modelslim.redundant(names, self._description)

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if name.endswith(".deq_scale") and stored.dtype is torch.int64:
            stored = (stored & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
        if name.endswith(_SCALES):
            check_scales(self._path, name, stored)
        if name.endswith(_OFFSETS):
            check_finite(self._path, name, stored)
        return {name: stored.float() if name.endswith(".input_offset") else stored}
