"""Weights in FRACTAL_NZ, the blocked format that the matrix unit reads directly.

A matrix in the plain format (ND) is rearranged at every matmul. Weights are cast once, after loading, if their shape
allows it: both axes of a 16-bit matrix must be multiples of 16; an int8 matrix, stored as [inputs, outputs], needs
inputs that are a multiple of 16 and outputs that are a multiple of 32. A weight tied to the embedding is not cast,
since the embedding reads rows from it.

A layer is known by the op that it calls (`srv.models.layers.op_layer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from srv.models.layers.op_layer import OpLayer, op_layers
from srv_npu.ops import Operators, column_shards
from srv_npu.sdk import Sdk

Shards: TypeAlias = tuple[Tensor, ...]
FRACTAL_NZ = 29  # the format's number in ACL
_MULTIPLES = {torch.float16: (16, 16), torch.bfloat16: (16, 16), torch.int8: (32, 16)}  # (outputs, inputs)


def cast_weights(sdk: Sdk, operators: Operators, model: nn.Module) -> tuple[int, int]:
    """Cast every weight that allows it, in place. Returns (matrices cast, all matrices).

    operators: the platform's operators, which run the int8 layers from then on.
    """
    int8_kernels: Mapping[str, Callable[[Operators, OpLayer, Shards], Callable[[Tensor], Tensor]]] = {
        "linear_w8a8": _dynamic,
        "linear_w8a8_static": _static,
    }
    layers = [layer for layer in op_layers(model) if layer.op == "linear" or layer.op in int8_kernels]
    cast = 0
    with torch.no_grad():
        for layer in layers:
            allowed = may_cast(layer)
            cast += allowed
            weight = layer.operands()[0]["weight"]
            if layer.op in int8_kernels:
                shards = tuple(shard.contiguous() for shard in column_shards(weight.data))
                layer.release()
                if allowed:
                    shards = tuple(sdk.npu_format_cast(shard, FRACTAL_NZ) for shard in shards)
                layer.kernel = int8_kernels[layer.op](operators, layer, shards)
            elif allowed:
                weight.data = sdk.npu_format_cast(weight.data, FRACTAL_NZ)
    return cast, len(layers)


def may_cast(layer: OpLayer) -> bool:
    """Whether FRACTAL_NZ can hold the weight and only matmuls read it."""
    weight = layer.operands()[0]["weight"]
    multiples = _MULTIPLES.get(weight.dtype)
    aligned = multiples is not None and all(
        size % multiple == 0 for size, multiple in zip(weight.shape, multiples, strict=True)
    )
    return aligned and not layer.tied


def _dynamic(operators: Operators, layer: OpLayer, shards: Shards) -> Callable[[Tensor], Tensor]:
    """The kernel of `linear_w8a8` on a weight stored as int8 [inputs, outputs], in one shard or more."""
    (operands,) = layer.operands()
    scale, bias = operands["weight_scale"], operands["bias"]
    bias = None if bias is None else bias.float()  # converted once to what the operator takes
    return partial(operators.linear_w8a8_shards, shards=shards, weight_scale=scale, bias=bias)


def _static(operators: Operators, layer: OpLayer, shards: Shards) -> Callable[[Tensor], Tensor]:
    """The kernel of `linear_w8a8_static`, likewise."""
    (operands,) = layer.operands()
    return partial(
        operators.linear_w8a8_static_shards,
        shards=shards,
        inverse_scale=1 / operands["input_scale"],
        input_offset=operands["input_offset"],
        quant_bias=operands["quant_bias"],
        deq_scale=operands["deq_scale"],
    )
