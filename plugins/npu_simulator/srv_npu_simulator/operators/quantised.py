"""Quantization of activations to int8, and int8 matmul, on host views."""

from __future__ import annotations

import torch
from torch import Tensor

from srv_npu_simulator.operators.checks import FLOATS, HALVES, Rules

# 128 * 128 * 1024 is 2 ** 24, up to which float32 represents every integer.
_EXACT_TERMS = 1024
_MAX_LAST_DIM = 65535  # limit of npu_quant_matmul

# The integers that PyTorch passes for a dtype if the argument is an int.
DTYPES = {
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    12: torch.qint8,
    15: torch.bfloat16,
}


def _dtype(rules: Rules, argument: str, number: int | None, allowed: tuple[torch.dtype, ...]) -> torch.dtype | None:
    if number is None:
        return None
    dtype = DTYPES.get(number)
    names = ", ".join(str(one) for one in allowed)
    rules.require(dtype in allowed, argument, dtype or number, f"must be one of {names}")
    return dtype


def dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(int8 like input, float32 scale of each row): scale = largest magnitude / 127, round half to even.

    The results are contiguous, whatever the strides of input.
    """
    rules = Rules("npu_dynamic_quant")
    rules.dtype("input", input, HALVES)
    rules.require(input.dim() >= 2, "input", f"of shape {tuple(input.shape)}", "must have at least 2 dimensions")
    rules.absent(group_index=group_index)
    _dtype(rules, "dst_type", dst_type, (torch.int8,))
    rules.require(quant_mode == "pertoken", "quant_mode", repr(quant_mode), "must be 'pertoken'")
    rules.require(dst_type_max == 0.0, "dst_type_max", dst_type_max, "must be 0.0 for int8")
    wide = input.contiguous().float()
    if smooth_scales is not None:
        rules.same_dtype("smooth_scales", smooth_scales, "input", input.dtype)
        rules.shape("smooth_scales", smooth_scales, input.shape[-1:], "one per column")
        wide = wide * smooth_scales.float()
    scale = wide.abs().amax(-1) / 127
    divided = wide / torch.where(scale == 0, 1.0, scale)[..., None]
    return divided.round().clamp_(-128, 127).to(torch.int8), scale


def quantize(
    self: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """round(self / scales + zero_points), or self * scales with div_mode False, as int8 along `axis`.

    The result is contiguous, whatever the strides of self.
    """
    rules = Rules("npu_quantize")
    rules.dtype("self", self, FLOATS)
    _dtype(rules, "dtype", dtype, (torch.qint8, torch.int8))
    rules.require(not div_mode, "div_mode", div_mode, "but the simulator has no reference for it: pass 1 / scales")
    rules.require(axis in (-1, self.dim() - 1), "axis", axis, "must be the last one, -1")
    rules.same_dtype("scales", scales, "self", self.dtype)
    for name, value in (("scales", scales), ("zero_points", zero_points)):
        if value is not None:
            fits = tuple(value.shape) in ((1,), tuple(self.shape[-1:]))
            rules.require(
                fits, name, f"of shape {tuple(value.shape)}", f"must have shape (1,) or {tuple(self.shape[-1:])}"
            )
    if zero_points is not None:
        rules.same_dtype("zero_points", zero_points, "scales", scales.dtype)
        rules.shape("zero_points", zero_points, scales.shape, "the shape of scales")
    scaled = self.contiguous().float() * scales.float()
    if zero_points is not None:
        scaled = scaled + zero_points.float()
    return scaled.round().clamp_(-128, 127).to(torch.int8)


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """(x1 @ x2 + int32 bias) * scale * pertoken_scale + float bias.

    x1: int8 [..., k]. x2: int8 [k, n], contiguous or the transpose of such. scale: [n] or [1]; int64 holds the bits of
    a float32. pertoken_scale: float32 [m]. The sum over k is exact, in int32.
    """
    rules = Rules("npu_quant_matmul")
    rules.absent(offset=offset, x1_dtype=x1_dtype, x2_dtype=x2_dtype, pertoken_scale_dtype=pertoken_scale_dtype)
    rules.absent(scale_dtype=scale_dtype, group_sizes=group_sizes, y_scale=y_scale)
    dtype = _dtype(rules, "output_dtype", output_dtype, (torch.int8, torch.float16, torch.bfloat16, torch.int32))
    _check_operands(rules, x1, x2)
    rules.require(dtype in HALVES, "output_dtype", dtype, "must be float16 or bfloat16: others are not simulated")
    rows, columns = x1.numel() // x1.shape[-1], x2.shape[1]
    _check_scales(rules, scale, pertoken_scale, bias, rows, columns, dtype)
    total = product(x1.reshape(rows, -1), x2)
    float_bias = None
    if bias is not None:
        if bias.dtype is torch.int32:
            total = total + bias
        else:
            float_bias = bias.float()
    wide = total.float() * _as_float(scale)
    if pertoken_scale is not None:
        wide = wide * pertoken_scale.reshape(-1, 1)
    if float_bias is not None:
        wide = wide + float_bias
    return wide.to(dtype).reshape(*x1.shape[:-1], columns)


def _check_operands(rules: Rules, x1: Tensor, x2: Tensor) -> None:
    rules.dtype("x1", x1, (torch.int8,))
    rules.dtype("x2", x2, (torch.int8,))
    rules.require(2 <= x1.dim() <= 6, "x1", f"of shape {tuple(x1.shape)}", "must have 2 to 6 dimensions")
    rules.contiguous("x1", x1)
    rules.dims("x2", x2, 2)
    described = f"with strides {x2.stride()}"
    whole = x2.is_contiguous() or x2.t().is_contiguous()
    rules.require(whole, "x2", described, "must be contiguous, or the transpose of a contiguous tensor")
    described = f"of shape {tuple(x2.shape)}"
    rules.require(
        x2.shape[0] == x1.shape[-1], "x2", described, f"must have the {x1.shape[-1]} rows that x1 has columns"
    )
    for name, operand in (("x1", x1), ("x2", x2)):
        size = operand.shape[-1]
        rules.require(
            size <= _MAX_LAST_DIM,
            name,
            f"of shape {tuple(operand.shape)}",
            f"its last dimension may be at most {_MAX_LAST_DIM}",
        )


def _check_scales(
    rules: Rules,
    scale: Tensor,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    rows: int,
    columns: int,
    dtype: torch.dtype | None,
) -> None:
    """The combinations of dtypes that A2 and A3 take for int8 factors and half outputs."""
    described = f"of shape {tuple(scale.shape)}"
    rules.require(tuple(scale.shape) in ((1,), (columns,)), "scale", described, f"must have shape (1,) or ({columns},)")
    if dtype is torch.bfloat16:
        rules.dtype("scale", scale, (torch.float32, torch.bfloat16))
    else:
        rules.dtype("scale", scale, (torch.float32,) if pertoken_scale is not None else (torch.float32, torch.int64))
    if pertoken_scale is not None:
        rules.dtype("pertoken_scale", pertoken_scale, (torch.float32,))
        rules.shape("pertoken_scale", pertoken_scale, (rows,), "one for each row of x1")
    if bias is not None:
        exact_only = dtype is torch.float16 and pertoken_scale is None
        rules.dtype("bias", bias, (torch.int32,) if exact_only else (torch.int32, torch.float32, torch.bfloat16))
        rules.shape("bias", bias, (columns,))


def _as_float(scale: Tensor) -> Tensor:
    """An int64 scale contains the bits of a float32 in its lower half."""
    if scale.dtype is torch.int64:
        return (scale & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
    return scale.float()


def product(x1: Tensor, x2: Tensor) -> Tensor:
    """x1 @ x2 in int32, exactly: float32 holds every sum over `_EXACT_TERMS` products of int8."""
    total = torch.zeros(x1.shape[0], x2.shape[1], dtype=torch.int32)
    for first in range(0, x1.shape[1], _EXACT_TERMS):
        last = first + _EXACT_TERMS
        total += (x1[:, first:last].float() @ x2[first:last].float()).int()
    return total
