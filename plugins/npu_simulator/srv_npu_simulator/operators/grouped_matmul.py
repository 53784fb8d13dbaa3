"""npu_grouped_matmul on host views: the products of consecutive rows with one weight per group.

Limits and combinations of dtypes are those of op-plugin's documentation (torch_npu-npu_grouped_matmul.md) for A2 and A3
with a group_list tensor, of which the simulator has those for one x and one result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from srv_npu_simulator.operators.checks import FLOATS, Rules
from srv_npu_simulator.operators.quantised import DTYPES, product

_INNER = 65536  # the last dimension of x and of the weight must be less
_MAX_GROUPS = 1024
_MAX_LIST = 128
_BIASES = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}
# Of int8 factors: the dtype of the scale for each dtype of the result.
_SCALES = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """[the products [M, N]]: x is one tensor [M, K]; weight one [E, K, N], or E of [K, N], contiguous or transposed.

    group_list int64 [E]: the rows of each group (group_list_type 1), or their cumulative sums (0). With int8 factors,
    scale and per_token_scale multiply the exact sums. bias: one [N] per weight.
    """
    rules = Rules("npu_grouped_matmul")
    rules.absent(offset=offset, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
    rules.absent(activation_input=activation_input, activation_quant_scale=activation_quant_scale)
    rules.absent(activation_quant_offset=activation_quant_offset, tuning_config=tuning_config, x_dtype=x_dtype)
    rules.absent(weight_dtype=weight_dtype, scale_dtype=scale_dtype, per_token_scale_dtype=per_token_scale_dtype)
    rules.require(split_item in (2, 3), "split_item", split_item, "only 2 and 3, one result, are simulated")
    rules.require(group_type == 0, "group_type", group_type, "must be 0, groups of rows: others are not simulated")
    rules.require(act_type == 0, "act_type", act_type, "but the simulator has no reference for it: pass 0")
    rows, weights = _check_factors(rules, x, weight)
    dtype = _check_types(rules, rows, weight, scale, per_token_scale, output_dtype)
    columns = weights[0].shape[1]
    _check_vectors(rules, rows, len(weights), columns, weight, bias, scale, per_token_scale)
    ends = _ends(rules, group_list, group_list_type, len(weights), rows.shape[0])
    out = torch.empty(rows.shape[0], columns, dtype=dtype)
    begin = 0
    for group, end in enumerate(ends):
        if end > begin:
            part = slice(begin, end)
            if scale is None:
                total = rows[part].float() @ weights[group].float()
            else:
                total = product(rows[part], weights[group]).float() * scale[group].float()
            if per_token_scale is not None:
                total = total * per_token_scale[0][part, None]
            out[part] = (total if bias is None else total + bias[group].float()).to(dtype)
        begin = end
    return [out]


def results_like(
    x: list[Tensor], weight: list[Tensor], *, output_dtype: int | None = None, **options: object
) -> list[Tensor]:
    """The shapes of `grouped_matmul`."""
    dtype = x[0].dtype if output_dtype is None else DTYPES[output_dtype]
    return [x[0].new_empty(x[0].shape[0], weight[0].shape[-1], dtype=dtype)]


def _check_factors(rules: Rules, x: list[Tensor], weight: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """x, and the weight of each group [K, N]."""
    rules.require(len(x) == 1, "x", f"{len(x)} tensors", "only one is simulated")
    rules.dims("x", x[0], 2)
    rules.contiguous("x", x[0])
    rules.require(0 < len(weight) <= _MAX_LIST, "weight", f"{len(weight)} tensors", f"must be 1 to {_MAX_LIST}")
    three = weight[0].dim() == 3
    rules.require(len(weight) == 1 or not three, "weight", "of three dimensions", "must be the only one of the list")
    weights = list(weight[0]) if three else weight
    rules.require(len(weights) <= _MAX_GROUPS, "weight", f"{len(weights)} groups", f"must be at most {_MAX_GROUPS}")
    for one in weights:
        rules.dims("weight", one, 2)
        rules.shape("weight", one, (x[0].shape[1], weights[0].shape[1]), "the columns of x, and equal outputs")
        whole = one.is_contiguous() or one.t().is_contiguous()
        rules.require(whole, "weight", f"with strides {one.stride()}", "must be contiguous, or transposed")
        inner = one.shape[1] if one.is_contiguous() else one.shape[0]
        rules.require(inner < _INNER, "weight", f"with a last dimension of {inner}", f"must be less than {_INNER}")
    rules.require(x[0].shape[1] < _INNER, "x", f"of {x[0].shape[1]} columns", f"must have less than {_INNER}")
    return x[0], weights


def _check_types(
    rules: Rules,
    x: Tensor,
    weight: list[Tensor],
    scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    number: int | None,
) -> torch.dtype:
    """The dtype of the result."""
    dtype = x.dtype if number is None else DTYPES.get(number)
    for one in weight:
        rules.same_dtype("weight", one, "x", x.dtype)
    if x.dtype is not torch.int8:
        rules.dtype("x", x, (*FLOATS, torch.int8))
        rules.require(scale is None, "scale", "given", "must be None for factors that are not int8")
        rules.require(per_token_scale is None, "per_token_scale", "given", "must be None for factors that are not int8")
        rules.require(dtype is x.dtype, "output_dtype", dtype, f"must be the dtype of x, {x.dtype}")
        return x.dtype
    rules.require(dtype in _SCALES, "output_dtype", dtype, "must be bfloat16 or float16: others are not simulated")
    assert dtype is not None
    rules.require(scale is not None, "scale", None, "must be given for int8 factors")
    assert scale is not None
    for one in scale:
        rules.dtype("scale", one, (_SCALES[dtype],))
    return dtype


def _check_vectors(
    rules: Rules,
    x: Tensor,
    groups: int,
    columns: int,
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
) -> None:
    """Biases and scales have one dimension, so that there is one per group only if there is one weight per group."""
    for name, vectors in (("bias", bias), ("scale", scale)):
        if vectors is None:
            continue
        rule = f"must be as many as the {len(weight)} weights"
        rules.require(len(vectors) == len(weight), name, f"{len(vectors)} tensors", rule)
        rule = "must have one dimension each, so pass a weight per group"
        rules.require(len(weight) == groups, name, "for several groups of one weight", rule)
        for one in vectors:
            rules.shape(name, one, (columns,))
    for one in bias or ():
        expected = _BIASES.get(x.dtype)
        rules.require(expected is not None, "bias", "given", "but the simulator has no reference for int8 factors")
        rules.dtype("bias", one, (expected,) if expected is not None else ())
    if per_token_scale is not None:
        rules.require(len(per_token_scale) == 1, "per_token_scale", f"{len(per_token_scale)} tensors", "must be one")
        rules.dtype("per_token_scale", per_token_scale[0], (torch.float32,))
        rules.shape("per_token_scale", per_token_scale[0], (x.shape[0],), "one per row of x")


def _ends(rules: Rules, group_list: Tensor | None, kind: int | None, groups: int, rows: int) -> Sequence[int]:
    """Where the rows of each group end."""
    if group_list is None:
        rules.require(False, "group_list", None, "must be given")
    assert group_list is not None
    rules.dtype("group_list", group_list, (torch.int64,))
    rules.shape("group_list", group_list, (groups,), "one per group")
    rules.require(kind in (0, 1), "group_list_type", kind, "must be 0 or 1")
    rules.require(kind == 0 or groups > 1, "group_list", "of one group", "must have more for group_list_type 1")
    values: list[int] = (group_list.cumsum(0) if kind == 1 else group_list).tolist()
    ascending = all(first <= second for first, second in zip([0, *values], values, strict=False))
    rules.require(ascending, "group_list", group_list.tolist(), "must not have a negative group")
    rules.require(values[-1] == rows, "group_list", group_list.tolist(), f"must add up to the {rows} rows of x")
    return values
