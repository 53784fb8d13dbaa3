"""Quantization of unquantized checkpoints to int8 or FP8 while they are loaded. Torch-free.

Weights of linear layers have one scale per output channel. The names of the methods are those of torchao.
"""

from __future__ import annotations

from functools import partial

from srv.quantization.method import QuantMethod, StoredModel
from srv.quantization.schemes import BIASES, Fp8, Int8, LayerSchemes, Scheme

WEIGHT_ONLY = "kernels of int8 experts may quantize their inputs, which int8wo excludes"
LEAVE_UNQUANTIZED = "Leave the weights unquantized"
QUANTIZE_INPUTS = "Use --torchao-config int8dq, or leave it out"
# Of latent attention: the up-projection of compressed vectors is no linear layer here, and `q_a_proj` is fused with
# `kv_a_proj_with_mqa`, whose outputs are cached.
_IN_FULL_PRECISION = ("q_a_proj", "kv_b_proj")


def is_quantized(layer: str) -> bool:
    """Whether the linear layer of this name is quantized: all within decoder layers, and never the output layer.

    So does SGLang with `--torchao-config`. Those that compute and expand compressed vectors, and those of recurrent
    layers that are not named `_proj`, stay in the model's dtype.
    """
    return layer.endswith("_proj") and layer.rpartition(".")[2] not in _IN_FULL_PRECISION


def _dynamic_experts(bias: bool) -> tuple[str, str] | None:
    return (BIASES, LEAVE_UNQUANTIZED) if bias else None


def _weight_only_experts(bias: bool) -> tuple[str, str] | None:
    return _dynamic_experts(bias) or (WEIGHT_ONLY, QUANTIZE_INPUTS)


def schemes(scheme: Scheme, model: StoredModel) -> LayerSchemes:
    """`scheme`: of all quantized layers."""
    return lambda names, inputs, embedding: scheme if not embedding and all(map(is_quantized, names)) else None


INT8DQ = QuantMethod(
    name="int8dq",
    storage="srv.quantization.formats.online_storage:OnlineInt8StorageFormat",
    ops=("linear_w8a8",),
    online=True,
    sharding=None,
    schemes=partial(schemes, Int8()),
    experts=_dynamic_experts,
)
INT8WO = INT8DQ._replace(
    name="int8wo",
    ops=("linear_int8",),
    schemes=partial(schemes, Int8("none")),
    experts=_weight_only_experts,
)
FP8WO = QuantMethod(
    name="fp8wo",
    storage="srv.quantization.formats.online_storage:OnlineFp8StorageFormat",
    ops=("linear_fp8",),
    online=True,
    sharding=None,
    schemes=partial(schemes, Fp8()),
)
