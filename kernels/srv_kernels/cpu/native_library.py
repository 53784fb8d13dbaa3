"""The native library for its callers in Python: loaded, with the dtypes that it knows.

Import raises ImportError where the library cannot be used; ask `library.load()` first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv_kernels.cpu.library import load

_loaded = load()
if _loaded.library is None:
    raise ImportError(f"the native CPU kernels cannot be used: {_loaded.reason}")
LIBRARY = _loaded.library
TYPES = {torch.float32: 0, torch.bfloat16: 1}
POOL_TYPES = {**TYPES, torch.int8: 2, torch.float16: 3}  # of keys and values


def set_threads(count: int) -> None:
    """Threads that every kernel runs on from now on, the caller's own included."""
    LIBRARY.srv_set_threads(count)


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix whose rows' elements lie beside one another; a copy only where it must be."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
