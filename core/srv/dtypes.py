"""The names of the dtypes that activations and KV pools may have, and the size of one element in bytes. Torch-free.

Wherever torch must not be imported, a dtype is represented by its torch name ("bfloat16").
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

ITEM_SIZES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})

# Those of stored tensors: bytes per element.
STORED_SIZES: Mapping[str, int] = MappingProxyType(
    {**ITEM_SIZES, "float8_e4m3fn": 1, "uint8": 1, "int8": 1, "int32": 4, "int64": 8}
)

# The dtypes in which weights are stored that are not quantized, the widest first.
FLOATS = ("float64", "float32", "float16", "bfloat16")

# 8-bit floats of KV pools: the value of `kv_cache_dtype`, and torch's name.
FLOAT8: Mapping[str, str] = MappingProxyType({"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"})


class KVScales(NamedTuple):
    """Of one layer in a pool of 8-bit floats, which holds keys divided by `key`, and values divided by `value`."""

    key: float = 1.0
    value: float = 1.0


def item_size(dtype: str) -> int:
    """Bytes per element. A dtype that is not resolved yet ("auto") counts as the widest."""
    return 1 if dtype in FLOAT8.values() else ITEM_SIZES.get(dtype, 4)
