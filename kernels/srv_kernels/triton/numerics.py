"""Dot products and rounding that are right both compiled and in Triton's interpreter.

The interpreter (Triton 3.9) keeps bfloat16 as 16-bit and float8 as 8-bit integers, hence three traps:

- `tl.dot` multiplies the integers of bfloat16 operands and returns numbers that are wrong by orders of magnitude;
- conversions from float32 to bfloat16 and float8 truncate, whatever rounding is requested;
- conversions of subnormal bfloat16 numbers and of infinite or NaN float8 numbers are wrong.

The kernels call `dot`, `widen`, `round_to` and `store` instead. Compiled code of these is Triton's own operation.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from srv_kernels.triton import registration

INTERPRETED = tl.constexpr(registration.INTERPRETED)
IEEE = tl.constexpr(
    "ieee"
)  # wrapped, because Triton 3.6 does not wrap the default value of an argument if it is a string


@triton.jit
def dot(a, b, acc, precision: tl.constexpr = IEEE):
    """acc + a @ b. a [M, K], b [K, N]: floats or int8 of one dtype; acc [M, N]: float32, or int32 for int8.

    precision: that of float32 operands, "ieee" or "tf32".
    """
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), acc, input_precision=precision, out_dtype=acc.dtype)
    # Triton 3.6 takes float32 for the dtype of results unless told.
    return tl.dot(a, b, acc, input_precision=precision, out_dtype=acc.dtype)


@triton.jit
def widen(x):
    """Floats as float32, exactly; integers as they are."""
    if x.dtype.is_int():
        return x
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if INTERPRETED and x.dtype == tl.float8e4nv:
        return _decode_float8(x, 3, 7, 0x7F, 0x7F)
    if INTERPRETED and x.dtype == tl.float8e5:
        return _decode_float8(x, 2, 15, 0x7C, 0x7D)
    if INTERPRETED and x.dtype == tl.float8e4b8:
        return _decode_float8(x, 3, 8, 0x80, 0x80)
    if INTERPRETED and x.dtype == tl.float8e5b16:
        return _decode_float8(x, 2, 16, 0x80, 0x80)
    return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 x rounded to nearest, ties to even, as `dtype`: a float dtype or int8.

    Magnitudes beyond the range become infinite in bfloat16 and float16, and the largest finite number in float8 and
    int8. NaN stays NaN in every float dtype.
    """
    tl.static_assert(x.dtype == tl.float32, "round_to rounds float32")
    if dtype == tl.int8:
        # 1.5 · 2²³ is where float32 numbers are one apart.
        return ((tl.clamp(x, -128.0, 127.0) + 12582912.0) - 12582912.0).to(tl.int8)
    if dtype == tl.float8e4nv:
        return _round_float8(x, dtype, 3, 7, 448.0, False)
    if dtype == tl.float8e5:
        return _round_float8(x, dtype, 2, 15, 57344.0, False)
    if dtype == tl.float8e4b8:
        return _round_float8(x, dtype, 3, 8, 240.0, True)
    if dtype == tl.float8e5b16:
        return _round_float8(x, dtype, 2, 16, 57344.0, True)
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def store(pointers, x, mask=None):
    """Store float32 rounded to the dtype of the pointers, and everything else as it is.

    `tl.store` would convert silently. This refuses any other pair of float dtypes.
    """
    dtype: tl.constexpr = pointers.dtype.element_ty
    if x.dtype == dtype or (x.dtype.is_int() and dtype.is_int()):
        tl.store(pointers, x, mask=mask)
    else:
        tl.store(pointers, round_to(x, dtype), mask=mask)


@triton.jit
def _round_float8(
    x,
    dtype: tl.constexpr,
    mantissa: tl.constexpr,
    bias: tl.constexpr,
    largest: tl.constexpr,
    unsigned_zero: tl.constexpr,
):
    # Comparisons, and not clamp, since NaN must stay NaN. Targets differ in whether their conversion saturates.
    x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))
    if not INTERPRETED:
        return x.to(dtype)
    bits = x.to(tl.uint32, bitcast=True)
    dropped: tl.constexpr = 23 - mantissa
    normal = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
    normal = ((normal >> dropped) << dropped).to(tl.float32, bitcast=True)
    # Adding 1.5 · 2²³ subnormals of the dtype rounds to a multiple of one.
    magic: tl.constexpr = 1.5 * 2.0 ** (24 - bias - mantissa)
    rounded = tl.where(tl.abs(x) < 2.0 ** (1 - bias), (x + magic) - magic, normal)
    # The dtype's exponent, once it is biased as float32's is, is a shift away from its place; subnormals included.
    code = (tl.abs(rounded) * 2.0 ** (bias - 127)).to(tl.uint32, bitcast=True) >> dropped
    sign = (bits >> 24) & 0x80
    if unsigned_zero:
        code = tl.where(x == x, tl.where(code == 0, 0, code | sign), 0x80)
    else:
        code = tl.where(x == x, code | sign, 0x7F)
    return code.to(tl.uint8).to(dtype, bitcast=True)


@triton.jit
def _decode_float8(x, mantissa: tl.constexpr, bias: tl.constexpr, infinite: tl.constexpr, nan: tl.constexpr):
    """infinite: the code of infinity, if it is less than `nan`, the first code of NaN."""
    code = x.to(tl.uint8, bitcast=True).to(tl.uint32)
    magnitude = code & 0x7F
    value = (magnitude << (23 - mantissa)).to(tl.float32, bitcast=True) * 2.0 ** (127 - bias)
    value = tl.where(code >= 0x80, -value, value)
    if nan == 0x80:  # NaN has the code of -0
        return tl.where(code == nan, float("nan"), value)
    infinity = tl.where(code >= 0x80, float("-inf"), float("inf"))
    return tl.where(magnitude >= nan, float("nan"), tl.where(magnitude == infinite, infinity, value))


@triton.jit
def convert_stored(x, dtype: tl.constexpr):
    """Stored keys or values as `dtype`; uint8 holds the codes of float8 e4m3fn, for targets that cannot convert it."""
    if x.dtype == dtype:
        return x
    if x.dtype == tl.uint8:
        code = x.to(tl.uint32)
        magnitude = code & 0x7F
        # float32 has the same fields with a larger bias; the factor is right for subnormal numbers as well.
        number = (magnitude << 20).to(tl.float32, bitcast=True) * 2.0**120
        number = tl.where(code >= 0x80, -number, number)
        return round_to(tl.where(magnitude == 0x7F, float("nan"), number), dtype)
    if INTERPRETED:
        return round_to(widen(x).to(tl.float32), dtype)
    return x.to(dtype)
