"""Weights in FRACTAL_NZ, the blocked format that the matrix unit reads in place.

A matrix in the plain format (ND) is rearranged at every product. The cast is made once, after loading, where the
format allows it: both axes of a 16-bit matrix are multiples of 16; of 8-bit ones, which lie as [inputs, outputs], the
outputs are multiples of 32. A weight that is also the embedding stays as it is, since rows are read from it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from srv.models.layers.linear import Linear, Projection
from srv.quantization.int8_layers import DynamicInt8Linear, StaticInt8Linear
from srv_npu.ops import Operators, in_columns
from srv_npu.sdk import Sdk

FRACTAL_NZ = 29  # the format's number in ACL
_MULTIPLES = {torch.float16: (16, 16), torch.bfloat16: (16, 16), torch.int8: (32, 16)}  # of outputs, of inputs


def cast_weights(sdk: Sdk, operators: Operators, model: nn.Module) -> tuple[int, int]:
    """Cast what allows it, in place of the plain weight; how many matrices that were, and of how many.

    operators: the platform's, which multiply by 8-bit weights from then on.
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
                columns = tuple(piece.contiguous() for piece in in_columns(each.weight.data))
                each.weight = nn.Parameter(each.weight.new_empty(0), requires_grad=False)
                if allowed:
                    columns = tuple(sdk.npu_format_cast(piece, FRACTAL_NZ) for piece in columns)
                _multiply_columns(operators, each, columns)
    return cast, len(matrices)


def may_cast(projection: Projection) -> bool:
    """Whether FRACTAL_NZ can hold the weight, and nothing but products reads it."""
    weight = projection.weight
    multiples = _MULTIPLES.get(weight.dtype)
    aligned = multiples is not None and all(
        size % multiple == 0 for size, multiple in zip(weight.shape, multiples, strict=True)
    )
    return aligned and not (isinstance(projection, Linear) and projection.tied)


def _multiply_columns(
    operators: Operators, linear: DynamicInt8Linear | StaticInt8Linear, columns: tuple[Tensor, ...]
) -> None:
    """Let the layer multiply by a weight that lies as int8 [inputs, outputs], in one piece or more."""
    if isinstance(linear, DynamicInt8Linear):
        bias = None if linear.bias is None else linear.bias.float()  # as the operator takes it: widened once
        linear.kernel = partial(operators.dynamic_product, columns=columns, weight_scale=linear.weight_scale, bias=bias)
        return
    linear.kernel = partial(
        operators.static_product,
        columns=columns,
        per_input=1 / linear.input_scale,
        input_offset=linear.input_offset,
        quant_bias=linear.quant_bias,
        deq_scale=linear.deq_scale,
    )
