"""How far the results of an op may be from its oracle's, by dtype, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - want| <= relative · |want| + scaled · (largest |want| of the result) + twice the smallest subnormal."""

    relative: float
    scaled: float


# Two roundings to the dtype (8, 11 or 24 bits of significand), with a small margin for the sums.
TWO_ROUNDINGS = {
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.bfloat16: Tolerance(2.0**-7, 2.0**-9),
    torch.float16: Tolerance(2.0**-10, 2.0**-12),
}
# Products of 16-bit values are exact in float32; the order of the sums is not prescribed.
FLOAT32_SUMS = {dtype: Tolerance(1e-5, 1e-5) for dtype in DTYPES}
# Inputs may be quantized to int8 with a scale per 32 or more: each has a random error of up to half a scale.
QUANTIZED_INPUTS = {dtype: Tolerance(2.0**-6, 2.0**-6) for dtype in DTYPES}
# Products of two scales (K-quants) may be rounded to float16.
FLOAT16_SCALES = {
    torch.float32: Tolerance(2.0**-10, 2.0**-11),
    torch.bfloat16: Tolerance(2.0**-7, 2.0**-8),
    torch.float16: Tolerance(2.0**-9, 2.0**-10),
}

# Sums over all tokens of a row in float32, in chunks or one by one; its inputs are exact.
RECURRENT_SUMS = {dtype: Tolerance(1e-4, 1e-4) for dtype in DTYPES}

# The largest element of a row is quantized to 127. One of K elements may be off by 1, since some implementations divide
# by the scale and others multiply by its inverse.
QUANTIZED_ROWS = {dtype: Tolerance(2.0**-7, 2.0**-7) for dtype in DTYPES}
# The products of two matrices in turn, with the inputs of both rounded to the dtype, or quantized to int8.
TWO_PRODUCTS = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(2.0**-6, 2.0**-7),
    torch.float16: Tolerance(2.0**-9, 2.0**-10),
}
TWO_QUANTIZED_PRODUCTS = {dtype: Tolerance(2.0**-5, 2.0**-5) for dtype in DTYPES}
