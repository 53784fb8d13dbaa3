"""Weights in FRACTAL_NZ, the blocked format that the matrix unit reads directly.

A matrix in the plain format (ND) is rearranged at every matmul. Weights are cast once, after loading, if their shape
allows it: both axes of a 16-bit matrix must be multiples of 16; an int8 matrix, stored as [inputs, outputs], needs
inputs that are a multiple of 16 and outputs that are a multiple of 32. A weight tied to the embedding is not cast,
since the embedding reads rows from it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from srv.models.layers.linear import Linear, Projection
from srv.quantization.int8_layers import DynamicInt8Linear, StaticInt8Linear
from srv_npu.ops import Operators, column_shards
from srv_npu.sdk import Sdk

FRACTAL_NZ = 29  # the format's number in ACL
_MULTIPLES = {torch.float16: (16, 16), torch.bfloat16: (16, 16), torch.int8: (32, 16)}  # (outputs, inputs)


def cast_weights(sdk: Sdk, operators: Operators, model: nn.Module) -> tuple[int, int]:
    """Cast every weight that allows it, in place. Returns (matrices cast, all matrices).

    operators: the platform's operators, which run the int8 layers from then on.
    """
    matrices = [module for module in model.modules() if isinstance(module, Projection)]
    cast = 0
    with torch.no_grad():
        for each in matrices:
            allowed = may_cast(each)
            cast += allowed
            if isinstance(each, Linear) and allowed:
                each.weight.data = sdk.npu_format_cast(each.weight.data, FRACTAL_NZ)
            elif isinstance(each, (DynamicInt8Linear, StaticInt8Linear)):
                shards = tuple(shard.contiguous() for shard in column_shards(each.weight.data))
                each.weight = nn.Parameter(each.weight.new_empty(0), requires_grad=False)
                if allowed:
                    shards = tuple(sdk.npu_format_cast(shard, FRACTAL_NZ) for shard in shards)
                _use_shards(operators, each, shards)
    return cast, len(matrices)


def may_cast(projection: Projection) -> bool:
    """Whether FRACTAL_NZ can hold the weight and only matmuls read it."""
    weight = projection.weight
    multiples = _MULTIPLES.get(weight.dtype)
    aligned = multiples is not None and all(
        size % multiple == 0 for size, multiple in zip(weight.shape, multiples, strict=True)
    )
    return aligned and not (isinstance(projection, Linear) and projection.tied)


def _use_shards(operators: Operators, linear: DynamicInt8Linear | StaticInt8Linear, shards: tuple[Tensor, ...]) -> None:
    """Let the layer use a weight stored as int8 [inputs, outputs], in one shard or more."""
    if isinstance(linear, DynamicInt8Linear):
        bias = None if linear.bias is None else linear.bias.float()  # converted once to what the operator takes
        linear.kernel = partial(
            operators.linear_w8a8_shards, shards=shards, weight_scale=linear.weight_scale, bias=bias
        )
        return
    linear.kernel = partial(
        operators.linear_w8a8_static_shards,
        shards=shards,
        inverse_scale=1 / linear.input_scale,
        input_offset=linear.input_offset,
        quant_bias=linear.quant_bias,
        deq_scale=linear.deq_scale,
    )
