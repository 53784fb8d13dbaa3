"""The names of the dtypes that activations may have, and the size of one element in bytes. Torch-free.

Wherever torch must not be imported, a dtype is represented by its torch name ("bfloat16").
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ITEM_SIZES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


def item_size(dtype: str) -> int:
    """Bytes per element. A dtype that is not resolved yet ("auto") counts as the widest."""
    return ITEM_SIZES.get(dtype, 4)
