"""The loaded native library and its dtype ids.

Importing this raises ImportError if the library cannot be used: check `library.load()` first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv_kernels.cpu.library import load

_loaded = load()
if _loaded.library is None:
    raise ImportError(f"the native CPU kernels cannot be used: {_loaded.reason}")
LIBRARY = _loaded.library
DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}
POOL_DTYPE_IDS = {
    **DTYPE_IDS,
    torch.int8: 2,
    torch.float16: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}  # of KV pools


def set_threads(count: int) -> None:
    """Set the number of threads that kernels use, including the caller's."""
    LIBRARY.srv_set_threads(count)


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix with contiguous rows; copied only if necessary."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
