"""Finds scales that are not finite numbers in the quantization blocks of GGUF files.

Owns where the blocks of each type have their scales. Must not know files. (Source: ggml's `ggml-common.h`)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy

from srv.models.checkpoints.gguf_types import TensorType

_Bytes: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]"
_Words: TypeAlias = "numpy.ndarray[Any, numpy.dtype[Any]]"

# The bytes of a block at which its float16 scales (and minimums) begin.
_OFFSETS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
        **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
        **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "TQ1_0": (52,),
        "TQ2_0": (64,),
    }
)
_EXPONENT = 0x7C00  # of float16; all of its bits are set in infinities and NaN
_MXFP4_NAN = 0xFF  # a scale of 8 bits, an exponent, has no infinity
_IQ1_M = 48  # where four words begin, whose highest four bits are together a float16, the lowest first


def finite_scales(rows: _Bytes, kind: TensorType) -> bool:
    """Whether all scales in whole rows of blocks are finite numbers; True for types without blocks."""
    if kind.name == "MXFP4":
        return not bool((rows[:: kind.size] == _MXFP4_NAN).any())
    if kind.name == "IQ1_M":
        words = [_words(rows, kind, _IQ1_M + 2 * index) >> 12 << 4 * index for index in range(4)]
        return _finite(words[0] | words[1] | words[2] | words[3])
    return all(_finite(_words(rows, kind, offset)) for offset in _OFFSETS.get(kind.name, ()))


def _words(rows: _Bytes, kind: TensorType, offset: int) -> _Words:
    """The 16 bits at a byte of each block, without a copy."""
    return numpy.ndarray((rows.size // kind.size,), "<u2", rows.data, offset, (kind.size,))


def _finite(scales: _Words) -> bool:
    return not bool(((scales & _EXPONENT) == _EXPONENT).any())
