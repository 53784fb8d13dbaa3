"""Quantization of unquantized checkpoints to int8 while they are loaded, with or without int8 activations. Torch-free.

Weights of linear layers have one scale per output channel. The names of the methods are those of torchao.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from srv.quantization import tensor_bytes
from srv.quantization.method import LayerOps, QuantMethod, StoredModel

if TYPE_CHECKING:
    from srv.specs import ModelFacts

BIASES = "experts with biases cannot be int8"
WEIGHT_ONLY = "kernels of int8 experts may quantize their inputs, which int8wo excludes"
LEAVE_UNQUANTIZED = "Leave the weights unquantized"
QUANTIZE_INPUTS = "Use --torchao-config int8dq, or leave it out"
_SCALE_BYTES = 4
# Of latent attention: the up-projection of compressed vectors is no linear layer here, and `q_a_proj` is fused with
# `kv_a_proj_with_mqa`, whose outputs are cached.
_IN_FULL_PRECISION = ("q_a_proj", "kv_b_proj")


def is_quantized(layer: str) -> bool:
    """Whether the linear layer of this name is quantized: all within decoder layers, and never the output layer.

    So does SGLang with `--torchao-config`. Those that compute and expand compressed vectors, and those of recurrent
    layers that are not named `_proj`, stay in the model's dtype.
    """
    return layer.endswith("_proj") and layer.rpartition(".")[2] not in _IN_FULL_PRECISION


def weight_bytes(model: ModelFacts, item_size: int, projection_params: int) -> int:
    """The weights of the projections count as one byte: for layers that do not describe their matrices."""
    return (model.counted_parameters() - projection_params) * item_size + projection_params


def matrix_bytes(outputs: int, inputs: int) -> int:
    """Bytes of a quantized matrix, with its scales."""
    return outputs * (inputs + _SCALE_BYTES)


def _dynamic_experts(bias: bool) -> tuple[str, str] | None:
    return (BIASES, LEAVE_UNQUANTIZED) if bias else None


def _weight_only_experts(bias: bool) -> tuple[str, str] | None:
    return _dynamic_experts(bias) or (WEIGHT_ONLY, QUANTIZE_INPUTS)


def _layer_ops(op: str, model: StoredModel) -> LayerOps:
    return lambda names, inputs, rows: op if not rows and all(map(is_quantized, names)) else ""


INT8DQ = QuantMethod(
    name="int8dq",
    layers="srv.quantization.int8_online_layers:DynamicLayerFactory",
    storage="srv.quantization.int8_online_layers:OnlineInt8StorageFormat",
    ops=("linear_w8a8",),
    weight_bytes=weight_bytes,
    sharding="weights quantized to int8 cannot be sharded yet",
    online=True,
    layer_ops=partial(_layer_ops, "linear_w8a8"),
    matrix_bytes=matrix_bytes,
    tensor_bytes=tensor_bytes.always_rows,
    experts=_dynamic_experts,
)
INT8WO = INT8DQ._replace(
    name="int8wo",
    layers="srv.quantization.int8_online_layers:WeightOnlyLayerFactory",
    ops=("linear_int8",),
    layer_ops=partial(_layer_ops, "linear_int8"),
    experts=_weight_only_experts,
)
