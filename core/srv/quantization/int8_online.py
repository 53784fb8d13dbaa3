"""Quantization of unquantized checkpoints to int8 while they are loaded, with or without int8 activations. Torch-free.

Weights of linear layers have one scale per output channel. The names of the methods are those of torchao.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srv.quantization.method import QuantMethod

if TYPE_CHECKING:
    from srv.specs import ModelFacts


def is_quantized(layer: str) -> bool:
    """Whether the linear layer of this name is quantized: all within decoder layers, and never the output layer.

    So does SGLang with `--torchao-config`.
    """
    return layer.endswith("_proj")


def weight_bytes(model: ModelFacts, item_size: int, projection_params: int) -> int:
    """The weights of the projections count as one byte."""
    return (model.parameters - projection_params) * item_size + projection_params


INT8DQ = QuantMethod(
    name="int8dq",
    layers="srv.quantization.int8_online_layers:DynamicLayerFactory",
    storage="srv.quantization.int8_online_layers:OnlineInt8StorageFormat",
    ops=("linear_w8a8",),
    weight_bytes=weight_bytes,
    sharding="weights quantized to int8 cannot be sharded yet",
    online=True,
)
INT8WO = INT8DQ._replace(
    name="int8wo",
    layers="srv.quantization.int8_online_layers:WeightOnlyLayerFactory",
    ops=("linear_int8",),
)
