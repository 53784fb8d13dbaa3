"""The layers of checkpoints that are quantized to int8 while they are loaded, and the quantization itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from srv.models.checkpoints.storage import StorageFormat
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Linear, Projection, Split
from srv.quantization.int8_experts import Int8Experts, unsupported_experts
from srv.quantization.int8_layers import DynamicInt8Linear, ScaledInt8Linear, WeightOnlyInt8Linear
from srv.quantization.int8_online import BIASES, LEAVE_UNQUANTIZED, QUANTIZE_INPUTS, WEIGHT_ONLY, is_quantized
from srv.quantization.method import StoredModel

_SCALE = ".weight_scale"
_INT8_MAX = 127


class OnlineInt8LayerFactory(LayerFactory):
    """Linear layers within decoder layers are of `layer_class`; embeddings and the output layer are not quantized."""

    layer_class: ClassVar[type[ScaledInt8Linear]]

    def __init__(self, context: BuildContext, model: StoredModel) -> None:
        super().__init__(context)

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: int = 1
    ) -> Projection:
        layer_class = self.layer_class if all(map(is_quantized, output_sizes)) else Linear
        return layer_class(self.context, output_sizes, inputs, bias)


class DynamicLayerFactory(OnlineInt8LayerFactory):
    """The layers of int8dq: activations are quantized too, per token."""

    layer_class = DynamicInt8Linear

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        if bias:
            raise unsupported_experts(prefix, BIASES, LEAVE_UNQUANTIZED)
        return Int8Experts(self.context, prefix, sizes)


class WeightOnlyLayerFactory(OnlineInt8LayerFactory):
    """The layers of int8wo."""

    layer_class = WeightOnlyInt8Linear

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        raise unsupported_experts(prefix, WEIGHT_ONLY, QUANTIZE_INPUTS)


class OnlineInt8StorageFormat(StorageFormat):
    """Unquantized checkpoints whose linear layers are quantized to int8 while they are loaded."""

    def __init__(self, model: StoredModel) -> None:
        """The format is the same for every model."""

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        layers = {name.removesuffix(".weight"): shape for name, shape in stored.items() if _becomes_int8(name)}
        return {**stored, **{f"{layer}{_SCALE}": (shape[0], 1) for layer, shape in layers.items()}}

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if not _becomes_int8(name):
            return {name: stored}
        quantized, scale = quantize_int8(stored)
        return {name: quantized, f"{name.removesuffix('.weight')}{_SCALE}": scale}


def _becomes_int8(name: str) -> bool:
    layer, _, suffix = name.rpartition(".")
    return suffix == "weight" and is_quantized(layer)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 quantization per output channel: [out, in] -> int8 [out, in], float32 scales [out, 1].

    The largest magnitude of each row becomes 127. A row of zeros has the scale 0.
    """
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / _INT8_MAX
    return (wide / torch.where(scale == 0, 1.0, scale)).round_().to(torch.int8), scale
