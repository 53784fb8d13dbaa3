"""The mathematics of each op in float64: the reference that implementations are compared with.

Results are float64 on the host for arguments of any dtype and device. Nothing here is meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def float64(x: Tensor) -> Tensor:
    return x.detach().to("cpu").double()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    wide = float64(x)
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * float64(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = residual + x, rounded to x's dtype as the residual stream is."""
    total = (float64(residual) + float64(x)).to(x.dtype)
    return rms_norm(total, weight, eps), total.double()


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs (i, i + R/2) of the first R elements of each head by the angle of its position.

    Rotary embedding (Su et al. 2021, arXiv:2104.09864), with the pairs of GPT-NeoX.
    """
    half = cos_sin.shape[1] // 2
    table = float64(cos_sin)[positions.to("cpu")].unsqueeze(1)
    cos, sin = table[..., :half], table[..., half:]

    def rotate(x: Tensor) -> Tensor:
        wide = float64(x)
        first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    return rotate(q), rotate(k)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(first half) · second half of the last axis (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""
    gate, up = float64(x).chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """gelu(first half) · second half of the last axis (GEGLU, Shazeer 2020), with the tanh approximation of GELU.

    (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), with u = sqrt(2 / pi) (x + 0.044715 x³); Hendrycks and Gimpel 2016,
    arXiv:1606.08415.
    """
    gate, up = float64(x).chunk(2, -1)
    doubled = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / (1 + (-doubled).exp()) * up


def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b with W = weight · weight_scale, and each row of x quantized to int8, its largest magnitude to 127.

    (Dettmers et al. 2022, arXiv:2208.07339, without the separate outliers.) A row's scale and the division by it are
    float32, as in every implementation; everything else is exact.
    """
    scale = x.detach().to("cpu").float().abs().amax(-1, keepdim=True) / 127
    quantized = (x.detach().to("cpu").float() / torch.where(scale == 0, 1.0, scale)).round().clamp(-127, 127)
    out = float64(quantized) @ float64(weight).T * scale.double() * float64(weight_scale)
    return out if bias is None else out + float64(bias)


def linear_w8a8_static(
    x: Tensor, weight: Tensor, input_scale: Tensor, input_offset: Tensor, quant_bias: Tensor, deq_scale: Tensor
) -> Tensor:
    """(q Wᵀ + quant_bias) · deq_scale, where q is x / input_scale + input_offset, rounded to int8.

    `quant_bias` includes the bias and the compensation of the offset, in units of `deq_scale`.
    """
    quantized = x.detach().to("cpu").float() * (1 / input_scale.to("cpu").float()) + input_offset.to("cpu").float()
    total = float64(quantized.round().clamp(-128, 127)) @ float64(weight).T + float64(quant_bias)
    return total * float64(deq_scale)


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b with W = weight · weight_scale; x is not quantized."""
    out = float64(x) @ float64(weight).T * float64(weight_scale)
    return out if bias is None else out + float64(bias)


def linear_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, block_outputs: int, block_inputs: int
) -> Tensor:
    """x Wᵀ + b with each block of the weight times its scale; x is not quantized."""
    out = float64(x) @ dequantize_fp8(weight, scale, block_outputs, block_inputs).T
    return out if bias is None else out + float64(bias)


def dequantize_fp8(weight: Tensor, scale: Tensor, block_outputs: int, block_inputs: int) -> Tensor:
    """float8_e4m3fn [N, K], scale [ceil(N / block_outputs), ceil(K / block_inputs)] -> float64 [N, K]."""
    outputs, inputs = torch.arange(weight.shape[0]) // block_outputs, torch.arange(weight.shape[1]) // block_inputs
    return float64(weight) * float64(scale)[outputs][:, inputs]


def linear_gguf(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """x Wᵀ, with W quantized as `quant_type` in a GGUF file and dequantized by the `gguf` library."""
    return float64(x) @ dequantize_rows(rows, quant_type).T


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ."""
    return float64(x) @ float64(weight).T


def linear_gguf_float32(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """As `linear_gguf`."""
    return linear_gguf(x, rows, quant_type)


def rows_gguf(rows: Tensor, quant_type: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Embedding lookup: the rows with these indices, dequantized to float64 for any `dtype`."""
    return dequantize_rows(rows, quant_type)[indices.to("cpu")]


# The values of 4-bit codes in checkpoints of bitsandbytes: quantiles of the normal distribution (Dettmers et al. 2023,
# arXiv:2305.14314), and a sign with three bits of a float.
TABLES = {
    "NF4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "FP4": tuple(sign * value / 192 for sign in (1, -1) for value in (0, 1, 128, 192, 64, 96, 32, 48)),
}


def dequantize_rows(rows: Tensor, quant_type: str) -> Tensor:
    """uint8 [N, bytes per row] -> float64 [N, K]."""
    if quant_type in TABLES:
        return _dequantize_by_table(rows.detach().to("cpu"), quant_type)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(rows.detach().to("cpu").numpy(), GGMLQuantizationType[quant_type])).double()


def _dequantize_by_table(rows: Tensor, quant_type: str) -> Tensor:
    """Blocks of 64 weights: a float32, by which values of the table are multiplied, and 32 bytes of codes.

    The low halves of 16 bytes are 16 weights, and their high halves the next 16.
    """
    blocks = rows.reshape(rows.shape[0], -1, 36)
    scale = blocks[..., :4].contiguous().view(torch.float32).double()
    codes = blocks[..., 4:].unflatten(-1, (2, 1, 16)).int()
    codes = torch.cat((codes & 15, codes >> 4), -2).flatten(-3)
    table = torch.tensor(TABLES[quant_type], dtype=torch.float32).double()
    return (table[codes] * scale).flatten(1)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi: Sequence[float] | None = None,
    chunk: int | None = None,
    sinks: Sequence[float] | None = None,
    temperature_from: int | None = None,
) -> Tensor:
    """Causal attention of ragged rows over a paged pool that already contains their keys and values.

    q: [tokens, heads, key_dim]; keys: [pages, page_size, kv_heads, key_dim], values likewise; page_table:
    [rows, columns]. Row i's queries are the last query_lens[i] of its kv_lens[i] tokens. `window`: a token
    attends to itself and the window - 1 tokens before it. `soft_cap`: scores become soft_cap · tanh(scores / soft_cap).
    `alibi`: the slope of each head, which multiplies the position of a key minus that of the query; the product is
    added to the score (Press et al. 2022, arXiv:2108.12409). `chunk`: a token attends only to those of its own chunk
    of so many positions. `sinks`: a score of each head that takes part in the softmax and has no value.
    `temperature_from`: capped scores of a query at a position p beyond this n are multiplied by ln(p) / ln(n). Returns
    [tokens, heads, value_dim].
    """
    group = q.shape[1] // keys.shape[2]
    page_size, begin, out = keys.shape[1], 0, []
    for row, (queries, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
        pages = page_table[row, : -(-length // page_size)].long().to(keys.device)
        key = float64(keys[pages]).flatten(0, 1)[:length].repeat_interleave(group, 1)
        value = float64(values[pages]).flatten(0, 1)[:length].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", float64(q[begin : begin + queries]), key) * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        if temperature_from is not None:
            positions = torch.arange(length - queries, length).double().clamp(min=temperature_from)
            scores *= (positions.log() / math.log(temperature_from))[:, None]
        distance = torch.arange(length - queries, length)[:, None] - torch.arange(length)
        if alibi is not None:
            scores -= torch.tensor(alibi, dtype=torch.float64)[:, None, None] * distance
        masked = (distance < 0) | (distance >= (length if window is None else window))
        if chunk is not None:
            masked |= torch.arange(length - queries, length)[:, None] // chunk != torch.arange(length) // chunk
        scores = scores.masked_fill(masked, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, torch.tensor(sinks).double()[:, None, None].expand(-1, queries, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        out.append(torch.einsum("hqk,khd->qhd", weights, value))
        begin += queries
    return torch.cat(out)
