"""Plain-torch implementations of the ops, for any device that torch supports.

They round where transformers does (a norm is computed in float32, cast to the model's dtype, then multiplied by
its weight), so that greedy decoding in bfloat16 agrees with other implementations. Signatures are those of
`srv_kernels.contracts`. Arguments are not modified.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]."""
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., D], weight [D] -> (rms_norm(residual + x), residual + x)."""
    total = residual + x
    return F.rms_norm(total, (x.shape[-1],), None, eps) * weight, total


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, KV, D], cos_sin float32 [P, R], positions int64 [T] -> (q', k').

    q and k are rotated as one tensor, since for few tokens the number of operators determines the time.
    """
    heads, dim, rotary_dim = q.shape[1], q.shape[2], cos_sin.shape[1]
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    both = torch.cat((q, k), 1)
    wide = both.float()
    first, second = (wide if rotary_dim == dim else wide[..., :rotary_dim]).chunk(2, -1)
    parts = [(first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)]
    if rotary_dim != dim:
        parts.append(wide[..., rotary_dim:])
    out = torch.cat(parts, -1).to(q.dtype)
    return out[:, :heads], out[:, heads:]


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] -> [..., I]: silu of the first half times the second."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] -> [..., I]: GELU (its tanh approximation) of the first half times the second."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] or None -> [T, N]."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    quantized = (wide / torch.where(scale == 0, 1.0, scale)).round_()
    out = _integer_matmul(quantized, weight) * scale * weight_scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def linear_w8a8_static(
    x: Tensor, weight: Tensor, input_scale: Tensor, input_offset: Tensor, quant_bias: Tensor, deq_scale: Tensor
) -> Tensor:
    """x [T, K], weight int8 [N, K], input_scale and input_offset float32 [1], quant_bias int32 [N],
    deq_scale float32 [N] -> [T, N].
    """
    quantized = (x.float() * (1 / input_scale) + input_offset).round_().clamp_(-128, 127)
    return ((_integer_matmul(quantized, weight) + quant_bias) * deq_scale).to(x.dtype)


_EXACT = 1024  # the number of int8 products whose float32 sum is exact: 128 · 128 · 1024 is 2²⁴


def _integer_matmul(quantized: Tensor, weight: Tensor) -> Tensor:
    """quantized [T, K] (integers as float32), weight int8 [N, K] -> float32 [T, N]: the exact sums, rounded once.

    The products are computed in float32, since torch has integer matmuls on few devices only.
    """
    total = quantized[:, :_EXACT] @ weight[:, :_EXACT].T.float()
    if weight.shape[1] <= _EXACT:
        return total
    whole = total.int()
    for start in range(_EXACT, weight.shape[1], _EXACT):
        part = slice(start, start + _EXACT)
        whole += (quantized[:, part] @ weight[:, part].T.float()).int()
    return whole.float()


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] or None -> [T, N].

    Converts the weight to float32 at every call.
    """
    out = x.float() @ weight.T.float() * weight_scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def linear_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, block_outputs: int, block_inputs: int
) -> Tensor:
    """x [T, K], weight float8_e4m3fn [N, K], scale float32 [ceil(N / block_outputs), ceil(K / block_inputs)], bias [N]
    or None -> [T, N].

    Converts the weight to float32 at every call.
    """
    outputs, inputs = (torch.arange(size, device=x.device) for size in weight.shape)
    scales = scale.index_select(0, outputs // block_outputs).index_select(1, inputs // block_inputs)
    out = x.float() @ (weight.float() * scales).T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def linear_gguf(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """x [T, K], rows uint8 [N, bytes per row] of a GGUF file -> [T, N]. Slow, since every call dequantizes the rows."""
    return F.linear(x, _dequantize(rows, quant_type, x.dtype))


_CONVERTED = 1 << 20  # weights that are converted at a time, so that they are read from the cache


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] of x's dtype -> float32 [T, N].

    Converts the weight at every call, some rows at a time.
    """
    wide = x.float()
    parts = weight.split(max(1, _CONVERTED // max(1, weight.shape[1])))
    return torch.cat([F.linear(wide, part.float()) for part in parts], -1)


def linear_gguf_float32(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """As `linear_gguf`, with sums and results in float32."""
    return F.linear(x.float(), _dequantize(rows, quant_type, torch.float32))


def rows_gguf(rows: Tensor, quant_type: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """rows uint8 [N, bytes per row] of a GGUF file, indices int64 [T] -> [T, K] of `dtype`.

    Embedding lookup: selects the rows, then dequantizes them.
    """
    return _dequantize(rows.index_select(0, indices), quant_type, dtype)


def _dequantize(rows: Tensor, quant_type: str, dtype: torch.dtype) -> Tensor:
    from srv_kernels.oracles import dequantize_rows

    return dequantize_rows(rows, quant_type).to(dtype).to(rows.device)
