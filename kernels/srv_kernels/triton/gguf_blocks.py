"""The blocks of GGUF files, read as stored: where a block has its scales and bits, and what they mean.

A row of a matrix is divided into *groups* of 16 *positions*. A position is a byte (of the bits that all types have at
least 2 of) and has one weight per *plane*: the low and the high half of Q4 bytes, the four 2-bit fields of Q2_K. All 16
weights of a group in one plane have the same scale, for every type.

    byte       0  1  2 ... 15 │ 16 ...        Q4_K, one of four chunks of 32 bytes
    plane 0    w0 w1 w2    w15│ w16 ...       low halves, weights 0 to 31 of the chunk
    plane 1    w32 w33     w47│ w48 ...       high halves, weights 32 to 63

Of types that have 32 neighbouring weights in 16 bytes (IQ4_XS, NF4), a group is such a run, whatever the size of a
block.

So a kernel multiplies plane by plane, with the matching elements of x, and never has to interleave weights. Loads that
planes have in common are merged by the compiler. The arithmetic is that of the `gguf` library, operation by operation.
The layouts are ggml's (ggml-common.h); all blocks have an even size, but few a multiple of 4.
"""

# Triton compiles what follows a constant condition, even if its branch returns; hence every else.
# ruff: noqa: RET505
# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import triton
import triton.language as tl

GROUP = 16  # positions


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Weights and bytes of a block, and the planes of its positions."""

    weights: int
    bytes: int
    planes: int

    def inputs(self, row_bytes: int) -> int:
        """Weights in a row of so many bytes."""
        return row_bytes // self.bytes * self.weights

    def groups(self, inputs: int) -> int:
        """Groups of positions in a row of so many weights."""
        return inputs // (GROUP * self.planes)


LAYOUTS: Mapping[str, BlockLayout] = {
    "Q4_0": BlockLayout(32, 18, 2),
    "Q4_1": BlockLayout(32, 20, 2),
    "Q5_0": BlockLayout(32, 22, 2),
    "Q5_1": BlockLayout(32, 24, 2),
    "Q8_0": BlockLayout(32, 34, 1),
    "Q2_K": BlockLayout(256, 84, 4),
    "Q3_K": BlockLayout(256, 110, 4),
    "Q4_K": BlockLayout(256, 144, 2),
    "Q5_K": BlockLayout(256, 176, 2),
    "Q6_K": BlockLayout(256, 210, 4),
    "IQ4_NL": BlockLayout(32, 18, 2),
    "IQ4_XS": BlockLayout(256, 136, 2),
    "MXFP4": BlockLayout(32, 17, 2),
    "NF4": BlockLayout(64, 36, 2),  # these two are bitsandbytes'
    "FP4": BlockLayout(64, 36, 2),
}
# Magnitudes of eight codes each, in the bytes of an integer from the lowest on: of IQ4's negative and positive values,
# twice those of E2M1, and 192 times those of bitsandbytes' FP4.
_IQ4_NEGATIVE, _IQ4_POSITIVE = tl.constexpr(0x0A1623314153687F), tl.constexpr(0x7159453526190D01)
_E2M1, _FP4 = tl.constexpr(0x0C08060403020100), tl.constexpr(0x30206040C0800100)


@triton.jit
def inputs_of(groups, plane: tl.constexpr, TYPE: tl.constexpr, WEIGHTS: tl.constexpr, PLANES: tl.constexpr):
    """The index in its row of a group's first weight in a plane; the other fifteen follow it."""
    if WEIGHTS < 256 or TYPE == "IQ4_XS":
        return groups * (16 * PLANES) + plane * 16
    else:  # K-quants: two groups, which have 32 neighbouring bytes, hold PLANES runs of 32 weights
        return groups // 2 * (32 * PLANES) + plane * 32 + groups % 2 * 16


@triton.jit
def load_weights(
    rows, groups, mask, plane: tl.constexpr, TYPE: tl.constexpr, WEIGHTS: tl.constexpr, BYTES: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    """float32 [N, G, 16]: one plane of some groups, dequantized; masked ones are unspecified, but finite if 0 is.

    rows: pointers to bytes, [N, 1, 1]; groups [1, G, 1]; mask [N, G, 1].
    """
    per_block: tl.constexpr = WEIGHTS // (16 * PLANES)
    block = rows + (groups // per_block).to(tl.int64) * BYTES
    group = groups % per_block
    at = tl.arange(0, 16)[None, None, :]
    if TYPE == "NF4" or TYPE == "FP4" or TYPE == "IQ4_XS":
        return _run_of_32(block, group, at, mask, plane, TYPE)
    elif WEIGHTS == 32:
        return _small_block(block, group * 16, at, mask, plane, TYPE)
    else:
        return _k_block(block, group, at, mask, plane, TYPE)


@triton.jit
def _small_block(block, first, at, mask, plane: tl.constexpr, TYPE: tl.constexpr):
    """Blocks of 32 weights with one scale. first: the byte of Q8_0 at which the group begins."""
    if TYPE == "Q8_0":
        return _signed(_byte(block + 2 + first + at, mask)).to(tl.float32) * _half(block, mask)
    elif TYPE == "Q4_0":
        codes = _bits(block + 2 + at, 4 * plane, 15, mask) - 8
        return _half(block, mask) * codes.to(tl.float32)
    elif TYPE == "Q4_1":
        codes = _bits(block + 4 + at, 4 * plane, 15, mask)
        return _half(block, mask) * codes.to(tl.float32) + _half(block + 2, mask)
    elif TYPE == "Q5_0":
        high = _bits(block + 2 + 2 * plane + at // 8, at % 8, 1, mask)
        codes = (_bits(block + 6 + at, 4 * plane, 15, mask) | (high << 4)) - 16
        return _half(block, mask) * codes.to(tl.float32)
    elif TYPE == "IQ4_NL":
        codes = _bits(block + 2 + at, 4 * plane, 15, mask)
        return _half(block, mask) * _iq4(codes)
    elif TYPE == "MXFP4":
        codes = _bits(block + 1 + at, 4 * plane, 15, mask)
        return _power(_byte(block, mask)) * _signed_magnitude(codes, _E2M1)
    else:
        tl.static_assert(TYPE == "Q5_1", "a GGUF type without a kernel")
        high = _bits(block + 4 + 2 * plane + at // 8, at % 8, 1, mask)
        codes = _bits(block + 8 + at, 4 * plane, 15, mask) | (high << 4)
        return _half(block, mask) * codes.to(tl.float32) + _half(block + 2, mask)


@triton.jit
def _run_of_32(block, group, at, mask, plane: tl.constexpr, TYPE: tl.constexpr):
    """Blocks of several runs of 32 weights in 16 bytes each; a group is a run."""
    if TYPE == "IQ4_XS":
        low = _bits(block + 4 + group // 2, group % 2 * 4, 15, mask)
        scale = (low | (_bits(block + 2 + group // 4, group % 4 * 2, 3, mask) << 4)) - 32
        codes = _bits(block + 8 + group * 16 + at, 4 * plane, 15, mask)
        step = _half(block, mask) * scale.to(tl.float32)
        return step * _iq4(codes)
    elif TYPE == "NF4":
        return _float(block, mask) * _nf4(_bits(block + 4 + group * 16 + at, 4 * plane, 15, mask))
    else:
        tl.static_assert(TYPE == "FP4", "a type without a kernel")
        codes = _bits(block + 4 + group * 16 + at, 4 * plane, 15, mask)
        return _float(block, mask) * (_signed_magnitude(codes, _FP4) / 192.0)


@triton.jit
def _magnitude(codes, TABLE: tl.constexpr):
    """float32: the byte of a table at the lower three bits of each code."""
    return ((tl.full([1, 1, 1], TABLE, tl.int64) >> ((codes & 7) * 8).to(tl.int64)) & 255).to(tl.float32)


@triton.jit
def _iq4(codes):
    return tl.where(codes < 8, -_magnitude(codes, _IQ4_NEGATIVE), _magnitude(codes, _IQ4_POSITIVE))


@triton.jit
def _signed_magnitude(codes, TABLE: tl.constexpr):
    """The fourth bit is the sign."""
    magnitude = _magnitude(codes, TABLE)
    return tl.where(codes < 8, magnitude, -magnitude)


@triton.jit
def _power(exponent):
    """2^(exponent - 128), of which the two smallest are subnormal numbers."""
    bits = tl.where(exponent < 2, 0x00200000 << (exponent & 1), (exponent - 1) << 23)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _nf4(codes):
    """The values of bitsandbytes' NF4, by their bits."""
    odd, two, four = (codes & 1) != 0, (codes & 2) != 0, (codes & 4) != 0
    first = tl.where(
        two,
        tl.where(odd, -0.39491748809814453, -0.5250730514526367),
        tl.where(odd, -0.6961928009986877, -1.0),
    )
    second = tl.where(
        two,
        tl.where(odd, 0.0, -0.09105003625154495),
        tl.where(odd, -0.18477343022823334, -0.28444138169288635),
    )
    third = tl.where(
        two,
        tl.where(odd, 0.33791524171829224, 0.24611230194568634),
        tl.where(odd, 0.16093020141124725, 0.07958029955625534),
    )
    fourth = tl.where(
        two,
        tl.where(odd, 1.0, 0.7229568362236023),
        tl.where(odd, 0.5626170039176941, 0.44070982933044434),
    )
    return tl.where(codes < 8, tl.where(four, second, first), tl.where(four, fourth, third))


@triton.jit
def _k_block(block, group, at, mask, plane: tl.constexpr, TYPE: tl.constexpr):
    """Blocks of 256 weights, with a scale per run of 32 (Q4_K, Q5_K) or 16 weights."""
    run = group // 2 * 2 + plane
    half_run = group // 2 * 8 + plane * 2 + group % 2
    if TYPE == "Q4_K":
        codes = _bits(block + 16 + group * 16 + at, 4 * plane, 15, mask)
        return _affine(block, codes, run, mask)
    elif TYPE == "Q5_K":
        high = _bits(block + 16 + group % 2 * 16 + at, run, 1, mask)  # one bit of each byte per run
        codes = _bits(block + 48 + group * 16 + at, 4 * plane, 15, mask) | (high << 4)
        return _affine(block, codes, run, mask)
    elif TYPE == "Q2_K":
        scales = _byte(block + half_run, mask)
        codes = _bits(block + 16 + group * 16 + at, 2 * plane, 3, mask)
        step = _half(block + 80, mask) * (scales & 15).to(tl.float32)
        return step * codes.to(tl.float32) - _half(block + 82, mask) * (scales >> 4).to(tl.float32)
    elif TYPE == "Q3_K":
        low = _bits(block + 96 + half_run % 8, half_run // 8 * 4, 15, mask)
        scale = (low | (_bits(block + 104 + half_run % 4, half_run // 4 * 2, 3, mask) << 4)) - 32
        unset = 1 - _bits(block + group % 2 * 16 + at, group // 2 * 4 + plane, 1, mask)
        codes = _bits(block + 32 + group * 16 + at, 2 * plane, 3, mask) - (unset << 2)
        return _half(block + 108, mask) * scale.to(tl.float32) * codes.to(tl.float32)
    else:
        tl.static_assert(TYPE == "Q6_K", "a GGUF type without a kernel")
        # Bytes of 64 low halves, of which planes 0 and 1 have the low bits, 2 and 3 the high ones.
        low = _bits(block + group // 2 * 64 + plane % 2 * 32 + group % 2 * 16 + at, plane // 2 * 4, 15, mask)
        codes = (low | (_bits(block + 128 + group * 16 + at, 2 * plane, 3, mask) << 4)) - 32
        scale = _signed(_byte(block + 192 + half_run, mask)).to(tl.float32)
        return _half(block + 208, mask) * scale * codes.to(tl.float32)


@triton.jit
def _affine(block, codes, run, mask):
    """Q4_K and Q5_K: 6-bit scales and minimums of eight runs in 12 bytes, the upper bits of the first four in pairs."""
    first = _byte(block + 4 + run % 4, mask)
    second = _byte(block + 8 + run % 4, mask)
    third = _byte(block + 12 + run % 4, mask)
    scale = tl.where(run < 4, first & 63, (third & 15) | ((first >> 2) & 48))
    minimum = tl.where(run < 4, second & 63, (third >> 4) | ((second >> 2) & 48))
    step = _half(block, mask) * scale.to(tl.float32)
    return step * codes.to(tl.float32) - _half(block + 2, mask) * minimum.to(tl.float32)


@triton.jit
def _byte(pointers, mask):
    return tl.load(pointers, mask=mask, other=0).to(tl.int32)


@triton.jit
def _bits(pointers, shift, bits, mask):
    return (_byte(pointers, mask) >> shift) & bits


@triton.jit
def _float(pointers, mask):
    """The float32 number of four bytes at any address."""
    low = _byte(pointers, mask) | (_byte(pointers + 1, mask) << 8)
    high = _byte(pointers + 2, mask) | (_byte(pointers + 3, mask) << 8)
    return (low | (high << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _signed(byte):
    return (byte ^ 128) - 128


@triton.jit
def _half(pointers, mask):
    """The float16 number of two bytes at any address, as float32."""
    both = _byte(pointers, mask) | (_byte(pointers + 1, mask) << 8)
    return both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
