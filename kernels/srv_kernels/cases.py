"""Test cases for the op contracts: ordinary inputs, and edge cases on which implementations often fail.

Owns the inputs only; `oracles` has the expected results, and `contracts` the tolerances. All tensors are on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """One call: a label for error messages, and positional arguments on the host.

    needs: the capability of a platform without which its implementations need not support the call; "": none.
    large: with so many rows that it is only for devices that do not run kernels in an interpreter.
    """

    label: str
    args: tuple[Any, ...]
    needs: str = ""
    large: bool = False


LARGE_ROWS = 2100  # tokens of a step; kernels may divide so many otherwise than a few hundred

# Magnitudes whose results are finite in every dtype, float16 included.
_MAGNITUDES = (1.0, 1e-3, 1e3)


def random_tensor(generator: torch.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def row_slices(generator: torch.Generator, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows that are a slice of a wider matrix, like the output of a fused projection after a split."""
    return random_tensor(generator, rows, dim + 24, dtype=dtype)[:, 8 : 8 + dim]


def _matrices(dtype: torch.dtype, seed: int, dims: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for rows in (0, 1, 3, 17):
        for dim in dims:
            yield f"{rows}x{dim}", random_tensor(generator, rows, dim, dtype=dtype)
            yield f"{rows}x{dim} of a wider matrix", row_slices(generator, rows, dim, dtype)
    for scale in _MAGNITUDES:
        yield f"magnitude {scale:g}", random_tensor(generator, 5, dims[-1], dtype=dtype, scale=scale)
    yield "zeros", torch.zeros(2, dims[-1], dtype=dtype)
    outlier = torch.full((1, dims[-1]), 1e-3, dtype=dtype)
    outlier[0, -1] = 1e3
    yield "one outlier among small entries", outlier
    yield "many rows", random_tensor(generator, 300, dims[-1], dtype=dtype)
    yield f"{LARGE_ROWS} rows", random_tensor(generator, LARGE_ROWS, dims[0], dtype=dtype)


def _is_large(x: Tensor) -> bool:
    return len(x) >= LARGE_ROWS


_NORM_DIMS = (64, 97, 576)
_WIDEST_PRODUCT = 14336  # the inner size of Llama 3.1 8B
_WIDEST_GATE = 29568  # the inner size of Qwen2-72B
_LAST_POSITION = 131071


def _wide_rows(dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Rows of hidden states that are wider than the blocks of most kernels."""
    generator = torch.Generator().manual_seed(seed)
    for dim in (5120, 8192):
        yield f"2x{dim}", random_tensor(generator, 2, dim, dtype=dtype)


def _heads(dtype: torch.dtype, seed: int) -> tuple[str, Tensor]:
    """The queries of a fused projection, whose heads are normalized one by one: [tokens, heads, dim]."""
    fused = random_tensor(torch.Generator().manual_seed(seed), 5, 8 * 128, dtype=dtype)
    return "6 heads of 128 of a fused projection", fused[:, : 6 * 128].view(5, 6, 128)


def _late_positions(dtype: torch.dtype, seed: int) -> Case:
    """Rotary embedding at the positions of long contexts; the table's other rows are never read."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor([_LAST_POSITION, 65536, 0, 65535, 32768, 4096])
    angles = positions[:, None] * 10000.0 ** -(torch.arange(16, dtype=torch.float64) / 16)
    cos_sin = torch.zeros(_LAST_POSITION + 1, 32)
    cos_sin[positions] = torch.cat((angles.cos(), angles.sin()), -1).float()
    q, k = (random_tensor(generator, len(positions), heads, 32, dtype=dtype) for heads in (4, 2))
    return Case(f"positions up to {_LAST_POSITION}", (q, k, cos_sin, positions))


def rms_norm_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 1)
    for label, x in (*_matrices(dtype, seed, _NORM_DIMS), *_wide_rows(dtype, seed), _heads(dtype, seed)):
        weight = (1 + 0.5 * torch.randn(x.shape[-1], generator=generator)).to(dtype)
        yield Case(label, (x, weight, 1e-5), large=_is_large(x))


def add_rms_norm_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 2)
    for label, x in (*_matrices(dtype, seed, _NORM_DIMS), *_wide_rows(dtype, seed)):
        weight = (1 + 0.5 * torch.randn(x.shape[-1], generator=generator)).to(dtype)
        residual = random_tensor(generator, *x.shape, dtype=dtype, scale=3.0)
        yield Case(label, (x, residual, weight, 1e-6), large=_is_large(x))


def silu_and_mul_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for label, x in _matrices(dtype, seed, (2, 62, 3072)):
        # 100² is finite in float16. Large negative gates are the hard inputs of SiLU, which must return 0 there.
        yield Case(label, (x.clamp(-100, 100) if x.is_contiguous() else x,), large=_is_large(x))
    wide = 2 * _WIDEST_GATE
    yield Case(f"2x{wide}", (random_tensor(torch.Generator().manual_seed(seed), 2, wide, dtype=dtype),))
    gates = torch.tensor([[-1e3, -90.0, -20.0, -1e-4, 0.0, 1e-4, 20.0, 90.0]], dtype=dtype)
    yield Case("gates from -1000 to 90", (torch.cat((gates, torch.full_like(gates, 2.0)), -1),))


def gelu_tanh_and_mul_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    # The same inputs are the hard ones: its tails are those of SiLU, only steeper.
    return silu_and_mul_cases(dtype, seed)


def rotary_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 3)
    shapes = ((0, 4, 2, 64, 64), (1, 9, 3, 64, 64), (3, 4, 4, 128, 128), (17, 8, 1, 32, 32), (5, 4, 2, 80, 20))
    shapes = (*shapes, (2, 96, 8, 128, 128), (2, 2, 1, 256, 64))
    for tokens, heads, kv_heads, dim, rotary_dim in (*shapes, (LARGE_ROWS, 2, 1, 32, 32)):
        for scale in _MAGNITUDES if tokens < LARGE_ROWS else (1.0,):
            fused = random_tensor(generator, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, scale=scale)
            q, k, _ = fused.split((heads * dim, kv_heads * dim, kv_heads * dim), -1)
            cos_sin, positions = _cos_sin(generator, tokens, rotary_dim)
            args = (q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim), cos_sin, positions)
            label = f"{tokens} tokens, {heads}/{kv_heads} heads of {dim}, {rotary_dim} rotated, x {scale:g}"
            yield Case(label, args, large=_is_large(fused))
    q, k = (random_tensor(generator, 2, heads, 64, dtype=dtype) for heads in (4, 2))
    yield Case("the same position twice", (q, k, *(_cos_sin(generator, 1, 64)[0], torch.tensor([7, 7]))))
    yield _late_positions(dtype, seed)


def _cos_sin(generator: torch.Generator, tokens: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    max_position = 4096
    angles = torch.arange(max_position)[:, None] * 10000.0 ** -(torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    return cos_sin, torch.randint(max_position, (tokens,), generator=generator)


def _int8(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _linear_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor, int, torch.Generator]]:
    """(label, x [T, K], N, generator) with few and many rows, odd and large K, outliers; one row in several cases."""
    generator = torch.Generator().manual_seed(seed + 4)
    sizes = ((1, 64, 96), (3, 96, 64), (17, 576, 192), (2, 1536, 64), (129, 64, 32), (LARGE_ROWS, 64, 32))
    for rows, inputs, outputs in sizes:
        yield f"{rows}x{inputs} to {outputs}", random_tensor(generator, rows, inputs, dtype=dtype), outputs, generator
    yield "rows of a wider matrix", row_slices(generator, 5, 64, dtype), 32, generator
    for scale in _MAGNITUDES:
        yield f"magnitude {scale:g}", random_tensor(generator, 4, 64, dtype=dtype, scale=scale), 32, generator
    mixed = random_tensor(generator, 3, 64, dtype=dtype)
    mixed[0] = 0
    mixed[1, 7] = 1e3
    yield "a row of zeros, and one with an outlier", mixed, 32, generator
    yield "odd sizes, 1x333 to 131", random_tensor(generator, 1, 333, dtype=dtype), 131, generator
    yield "odd sizes, 5x333 to 131", random_tensor(generator, 5, 333, dtype=dtype), 131, generator
    wide = random_tensor(generator, 2, _WIDEST_PRODUCT, dtype=dtype)
    wide[:, torch.arange(_WIDEST_PRODUCT) % 16 != 15] = 0  # the order of the sum matters no more than in smaller ones
    yield f"2x{_WIDEST_PRODUCT} to 32", wide, 32, generator


def linear_float32_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for label, x, outputs, generator in _linear_inputs(dtype, seed):
        yield Case(label, (x, random_tensor(generator, outputs, x.shape[1], dtype=dtype)), large=_is_large(x))


def scaled_linear_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for index, (label, x, outputs, generator) in enumerate(_linear_inputs(dtype, seed)):
        weight = _int8(generator, outputs, x.shape[1])
        scale = torch.rand(outputs, generator=generator) * 1e-3 + 1e-5
        bias = random_tensor(generator, outputs, dtype=dtype) if index % 2 else None
        yield Case(f"{label}{', with a bias' if index % 2 else ''}", (x, weight, scale, bias), large=_is_large(x))


def random_fp8(generator: torch.Generator, *shape: int) -> Tensor:
    """All finite float8_e4m3fn values, subnormal ones and both zeros among them."""
    codes = torch.randint(0, 254, shape, generator=generator, dtype=torch.uint8)
    return (codes + (codes >= 127)).view(torch.float8_e4m3fn)  # 127 and 255 are NaN


def fp8_scales(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator) * 3e-4 + 3e-6


# (outputs, inputs) of the blocks that have a scale, by their names. So many inputs are all inputs.
ALL_INPUTS = 1 << 20
_SCALED_BLOCKS = {
    "a scale per output": (1, ALL_INPUTS),
    "one scale": (1 << 20, ALL_INPUTS),
    "blocks of 128 x 128": (128, 128),
    "blocks of 48 x 32": (48, 32),
    "blocks of 1 x 64": (1, 64),
}


def linear_fp8_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for index, (label, x, outputs, generator) in enumerate(_linear_inputs(dtype, seed)):
        kinds = _SCALED_BLOCKS if index < 3 else list(_SCALED_BLOCKS)[index % 5 : index % 5 + 1]
        for name in kinds:
            yield _fp8_case(f"{label}, {name}", x, outputs, name, generator, biased=index % 2 == 1)
    x = random_tensor(generator, 5, 333, dtype=dtype)
    for name in _SCALED_BLOCKS:
        yield _fp8_case(f"odd sizes, {name}", x, 131, name, generator, biased=True)
    small = torch.randint(0, 8, (33, 64), generator=generator, dtype=torch.uint8)
    small += 128 * torch.randint(0, 2, (33, 64), generator=generator, dtype=torch.uint8)
    args = (small.view(torch.float8_e4m3fn), torch.rand(33, 1, generator=generator), None, 1, ALL_INPUTS)
    yield Case("subnormal weights", (random_tensor(generator, 3, 64, dtype=dtype), *args))


def _fp8_case(label: str, x: Tensor, outputs: int, name: str, generator: torch.Generator, *, biased: bool) -> Case:
    inputs, (rows, columns) = x.shape[1], _SCALED_BLOCKS[name]
    scale = fp8_scales(generator, -(-outputs // rows), -(-inputs // columns))
    bias = random_tensor(generator, outputs, dtype=x.dtype) if biased else None
    args = (x, random_fp8(generator, outputs, inputs), scale, bias, rows, columns)
    return Case(label, args, large=_is_large(x))


def linear_w8a8_static_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for label, x, outputs, generator in _linear_inputs(dtype, seed):
        weight = _int8(generator, outputs, x.shape[1])
        largest = float(x.float().abs().max()) or 1.0
        # Dividing by a power of two is exact, so that all implementations round to the same integer.
        scale = torch.tensor([2.0 ** math.ceil(math.log2(largest / 100))])
        offset = torch.randint(-20, 21, (1,), generator=generator).float()
        bias = (
            -(offset.int() * weight.int().sum(1)).int() + torch.randint(-99, 100, (outputs,), generator=generator).int()
        )
        deq_scale = scale * (torch.rand(outputs, generator=generator) * 1e-3 + 1e-5)
        yield Case(label, (x, weight, scale, offset, bias, deq_scale), large=_is_large(x))


# Weights per block, bytes per block, and the offsets of its half-precision scales.
GGUF_BLOCKS = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q2_K": (256, 84, (80, 82)),
    "Q3_K": (256, 110, (108,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
    "IQ4_NL": (32, 18, (0,)),
    "IQ4_XS": (256, 136, (0,)),
    "MXFP4": (32, 17, ()),
    "NF4": (64, 36, ()),
    "FP4": (64, 36, ()),
    "IQ1_S": (256, 50, (0,)),
    "IQ1_M": (256, 56, ()),
    "IQ2_XXS": (256, 66, (0,)),
    "IQ2_XS": (256, 74, (0,)),
    "IQ2_S": (256, 82, (0,)),
    "IQ3_XXS": (256, 98, (0,)),
    "IQ3_S": (256, 110, (0,)),
    "TQ1_0": (256, 54, (52,)),
    "TQ2_0": (256, 66, (64,)),
}


def gguf_capability(*quant_types: str) -> str:
    """The capability that blocks of such types need beyond gguf_blocks; "": none."""
    return "gguf_codebooks" if any(name.startswith(("IQ1", "IQ2", "IQ3", "TQ")) for name in quant_types) else ""


def random_gguf_rows(generator: torch.Generator, outputs: int, inputs: int, quant_type: str) -> Tensor:
    """uint8 [outputs, bytes per row]: random bits, except for the scales, which have typical values."""
    weights, size, scales = GGUF_BLOCKS[quant_type]
    count = inputs // weights
    rows = torch.randint(0, 256, (outputs, count, size), generator=generator, dtype=torch.uint8)
    for at in scales:
        scale = torch.rand(outputs, count, 1, generator=generator) * 0.004 + 0.0005
        rows[:, :, at : at + 2] = scale.half().view(torch.uint8)
    if quant_type == "MXFP4":  # the exponent of a power of two
        rows[:, :, 0] = torch.randint(118, 124, (outputs, count), generator=generator).to(torch.uint8)
    elif quant_type in ("NF4", "FP4"):
        scale = torch.rand(outputs, count, 1, generator=generator) * 0.4 + 0.05
        rows[:, :, :4] = scale.view(torch.uint8)
    elif quant_type == "IQ1_M":
        _put_iq1_m_scales(rows, torch.rand(outputs, count, generator=generator) * 0.004 + 0.0005)
    return rows.view(outputs, -1)


def _put_iq1_m_scales(rows: Tensor, scales: Tensor) -> None:
    """The four bits of each quarter of a half-precision scale are the highest of a 16-bit word, the lowest first."""
    bits = scales.half().view(torch.int16).int()
    for index in range(4):
        high = rows[:, :, 49 + 2 * index]
        high.copy_((high & 15) | ((bits >> 4 * index & 15) << 4).to(torch.uint8))


def linear_gguf_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 5)
    for quant_type in GGUF_BLOCKS:
        for rows, inputs, outputs in ((1, 256, 40), (5, 512, 70)):
            x = random_tensor(generator, rows, inputs, dtype=dtype)
            yield Case(
                f"{quant_type}, {rows}x{inputs} to {outputs}",
                (x, random_gguf_rows(generator, outputs, inputs, quant_type), quant_type),
                gguf_capability(quant_type),
            )
    for quant_type in ("Q4_1", "Q8_0"):
        weight = random_gguf_rows(generator, 33, 96, quant_type)
        yield Case(f"{quant_type}, rows of a wider matrix", (row_slices(generator, 3, 96, dtype), weight, quant_type))
        for count in (130, LARGE_ROWS):
            x = random_tensor(generator, count, 96, dtype=dtype)
            yield Case(f"{quant_type}, {count} rows", (x, weight, quant_type), large=_is_large(x))
        yield Case(f"{quant_type}, zeros", (torch.zeros(2, 96, dtype=dtype), weight, quant_type))
        for scale in _MAGNITUDES:
            x = random_tensor(generator, 4, 96, dtype=dtype, scale=scale)
            yield Case(f"{quant_type}, magnitude {scale:g}", (x, weight, quant_type))


def rows_gguf_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed + 6)
    for quant_type in GGUF_BLOCKS:
        indices = torch.tensor([0, 69, 33, 33, 31, 32])
        rows = random_gguf_rows(generator, 70, 512, quant_type)
        yield Case(quant_type, (rows, quant_type, indices, dtype), gguf_capability(quant_type))
    no_rows = torch.zeros(0, dtype=torch.int64)
    yield Case("no row", (random_gguf_rows(generator, 3, 256, "Q8_0"), "Q8_0", no_rows, dtype))
