"""The ops of `srv_kernels.contracts` in the native library: float32 and bfloat16, in host memory.

Importing this raises ImportError if the library cannot be used: check `library.load()` first. torch's compiler sees the
reference in place of norms, rotary embeddings and activations: it fuses them with what surrounds them.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor
from torch.compiler import is_compiling

from srv_kernels import reference
from srv_kernels.cpu.library import DrawArgs
from srv_kernels.cpu.native_library import DTYPE_IDS, LIBRARY, rows_of
from srv_kernels.cpu.native_linear import GGML_TYPES, DequantizedLinear, GGUFWeight, Int8WeightLinear, W8A8Linear


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]."""
    if is_compiling():
        return reference.rms_norm(x, weight, eps)
    rows = rows_of(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    count, dim = rows.shape
    LIBRARY.srv_rms_norm(
        DTYPE_IDS[x.dtype], out.data_ptr(), rows.data_ptr(), weight.data_ptr(), count, dim, rows.stride(0), eps
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., D], weight [D] -> (rms_norm(residual + x), residual + x)."""
    if is_compiling():
        return reference.add_rms_norm(x, residual, weight, eps)
    rows, residual_rows = rows_of(x), rows_of(residual)
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    count, dim = rows.shape
    LIBRARY.srv_add_rms_norm(
        DTYPE_IDS[x.dtype],
        out.data_ptr(),
        total.data_ptr(),
        rows.data_ptr(),
        residual_rows.data_ptr(),
        weight.data_ptr(),
        count,
        dim,
        rows.stride(0),
        residual_rows.stride(0),
        eps,
    )
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] -> [..., I]: silu of the first half times the second."""
    if is_compiling():
        return reference.silu_and_mul(x)
    rows = rows_of(x)
    count, dim = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(*x.shape[:-1], dim, dtype=x.dtype)
    LIBRARY.srv_silu_and_mul(DTYPE_IDS[x.dtype], out.data_ptr(), rows.data_ptr(), count, dim, rows.stride(0))
    return out


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, KV, D], cos_sin float32 [P, R], positions int64 [T] -> (q', k')."""
    if is_compiling():
        return reference.rotary(q, k, cos_sin, positions)
    q, k = _with_contiguous_heads(q), _with_contiguous_heads(k)
    tokens, heads, dim = q.shape
    q_out, k_out = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    LIBRARY.srv_rotary(
        DTYPE_IDS[q.dtype],
        q_out.data_ptr(),
        k_out.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        cos_sin.data_ptr(),
        positions.data_ptr(),
        tokens,
        heads,
        k.shape[1],
        dim,
        cos_sin.shape[1],
        q.stride(0),
        k.stride(0),
    )
    return q_out, k_out


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, V] -> (int64 [T]: argmax, the first among equals; bool [T]: whether the logits are valid).

    Logits are not valid, and the argmax is 0, if one is NaN or +inf, or all are -inf.
    """
    rows = rows_of(logits)
    count, vocab = rows.shape
    tokens, finite = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
    LIBRARY.srv_most_likely(
        DTYPE_IDS[rows.dtype], tokens.data_ptr(), finite.data_ptr(), rows.data_ptr(), count, vocab, rows.stride(0)
    )
    return tokens, finite


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """logits [T, V] -> int64 [T]: tokens sampled as `srv.platform.interface.SamplingBackend` specifies.

    temperature, top_p, min_p: float32 [T]; top_k: int32 [T], at least 1; uniform: float64 [T] in [0, 1). Rows without
    valid logits (see `most_likely`) get token 0. Weights are float32. Sums are float64, with two exceptions in float32:
    within blocks of 256 tokens without filters, and over tokens more than 16 temperatures below the largest logit.
    """
    rows = rows_of(logits)
    count, vocab = rows.shape
    columns = [column.contiguous() for column in (temperature, top_k, top_p, min_p, uniform)]
    tokens = torch.empty(count, dtype=torch.int64)
    args = DrawArgs(
        rows.data_ptr(), *(column.data_ptr() for column in columns), tokens.data_ptr(), count, vocab, rows.stride(0)
    )
    LIBRARY.srv_draw(DTYPE_IDS[rows.dtype], byref(args))
    return tokens


def _with_contiguous_heads(x: Tensor) -> Tensor:
    """[T, H, D] with contiguous heads; only the token axis may have any stride."""
    _, heads, dim = x.shape
    return x if x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim) else x.contiguous()


def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """See the contract. Packs the weight at every call: layers keep a `W8A8Linear` instead."""
    return W8A8Linear(weight, weight_scale, bias)(x)


def linear_w8a8_static(
    x: Tensor, weight: Tensor, input_scale: Tensor, input_offset: Tensor, quant_bias: Tensor, deq_scale: Tensor
) -> Tensor:
    """See the contract. Packs the weight at every call: layers keep a `W8A8Linear` instead."""
    static = (1.0 / float(input_scale), float(input_offset))
    return W8A8Linear(weight, deq_scale, int32_bias=quant_bias, static=static)(x)


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """See the contract. Packs the weight at every call: layers keep an `Int8WeightLinear` instead."""
    return Int8WeightLinear(weight, weight_scale, bias)(x)


def linear_gguf_float32(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """See the contract. Packs the weight at every call: layers keep a `GGUFWeight` instead."""
    return _packed(rows, quant_type).linear(x, float32_out=True)


def linear_gguf(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """See the contract. Packs the weight at every call: layers keep a `GGUFWeight` instead."""
    return _packed(rows, quant_type).linear(x)


def full_linear_gguf(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """As `linear_gguf`, without rounding x."""
    return DequantizedLinear([_packed(rows, quant_type)])(x)


def full_linear_gguf_float32(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """As `linear_gguf_float32`, without rounding x."""
    return DequantizedLinear([_packed(rows, quant_type)], float32_out=True)(x)


def rows_gguf(rows: Tensor, quant_type: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """See the contract. Packs the weight at every call: layers keep a `GGUFWeight` instead."""
    return _packed(rows, quant_type).rows(indices, dtype)


def _packed(rows: Tensor, quant_type: str) -> GGUFWeight:
    bytes_per_256 = LIBRARY.srv_gguf_row_bytes(GGML_TYPES[quant_type], 256)
    return GGUFWeight(rows, quant_type, rows.shape[1] * 256 // bytes_per_256)
