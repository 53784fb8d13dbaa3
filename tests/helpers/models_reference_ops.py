"""Reference implementations in torch of the ops that native layers need; every platform must match them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.platform.interface import OpImpl
from srv.platform.ops import Ops
from srv_kernels.oracles import dequantize_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)

    return turn(q), turn(k)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    out = (x / scale.clamp_min(1e-30)).round() @ weight.double().T * scale * weight_scale
    return (out if bias is None else out + bias).to(x.dtype)


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight.float() * weight_scale[:, None], bias).to(x.dtype)


def linear_w8a8_static(
    x: Tensor, weight: Tensor, input_scale: Tensor, input_offset: Tensor, quant_bias: Tensor, deq_scale: Tensor
) -> Tensor:
    steps = (x / input_scale + input_offset).round().clamp(-128, 127)
    return ((steps.double() @ weight.double().T + quant_bias) * deq_scale).to(x.dtype)


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    wide = scale.repeat_interleave(min(rows, weight.shape[0]), 0)[: weight.shape[0]]
    wide = wide.repeat_interleave(min(columns, weight.shape[1]), 1)[:, : weight.shape[1]]
    return F.linear(x.float(), weight.float() * wide, None if bias is None else bias.float()).to(x.dtype)


def linear_gguf(x: Tensor, rows: Tensor, stored: str) -> Tensor:
    return F.linear(x, rows_gguf(rows, stored, torch.arange(rows.shape[0]), x.dtype))


def rows_gguf(rows: Tensor, stored: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_rows(rows[indices], stored).to(dtype)


def reference_impls() -> list[OpImpl]:
    ops = (
        rms_norm,
        add_rms_norm,
        rotary,
        silu_and_mul,
        linear_w8a8,
        linear_w8a8_static,
        linear_int8,
        linear_fp8,
        linear_gguf,
        rows_gguf,
    )
    impls = [OpImpl(op.__name__, "torch", lambda args: None, op) for op in ops]
    experts = ("route_experts", "experts", "experts_int8", "experts_gguf", "experts_fp8")
    impls += [OpImpl(op, "torch", lambda args: None, f"srv_kernels.expert_reference:{op}") for op in experts]
    recurrent = ("causal_conv1d", "gated_delta_rule", "gated_linear_recurrence", "selective_scan", "state_space_scan")
    return impls + [OpImpl(op, "torch", lambda args: None, f"srv_kernels.recurrent_reference:{op}") for op in recurrent]


def reference_ops() -> Ops:
    return Ops("reference", reference_impls())
