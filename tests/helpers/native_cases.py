"""Dtypes, cases and inputs of the tests of native kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

DTYPES = (torch.float32, torch.bfloat16)


def avx2_cases(ops: Iterable[str], covers: Callable[..., pytest.MarkDecorator]) -> list[Any]:
    """Each op in each dtype, as evidence if the processor is made to take the path of AVX2.

    covers: `srv_matrix.pytest_plugin.covers`, by whose import the matrix finds the files with evidence.
    """
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
    return [
        pytest.param(
            *(op, dtype),
            marks=covers(f"op:{op}/{name}", platform="cpu", variant="avx2", note="forced path"),
            id=f"{op}-{name}",
        )
        for op in ops
        for dtype, name in names.items()
    ]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
