"""Validation of calls to the stand-ins: every message is `function: argument: is <value>, <rule>`.

Rules look only at shapes, dtypes, devices and host values. Unless a stand-in says otherwise, a refusal is a ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from srv.testing.simulated_device.tensors import is_device_tensor

HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Rules:
    """The rules for one function."""

    def __init__(self, function: str) -> None:
        self.function = function

    def require(self, holds: bool, argument: str, value: object, rule: str, kind: type[Exception] = ValueError) -> None:
        """Refuse unless `holds`."""
        if not holds:
            raise kind(f"{self.function}: {argument}: is {value}, {rule}")

    def on_device(self, **tensors: Tensor | None) -> None:
        """Refuse a tensor that is not on the GPU."""
        for argument, tensor in tensors.items():
            if tensor is not None:
                self.require(is_device_tensor(tensor), argument, f"on {tensor.device}", "must be on the GPU")

    def dtype(self, argument: str, dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
        names = " or ".join(str(one).removeprefix("torch.") for one in allowed)
        self.require(dtype in allowed, argument, dtype, f"must be {names}")

    def int32(self, **tensors: Tensor | None) -> None:
        """Refuse indices that are not int32, and those of more than one dimension."""
        for argument, tensor in tensors.items():
            if tensor is not None:
                self.dtype(argument, tensor.dtype, (torch.int32,))
                self.require(tensor.dim() == 1, argument, f"of shape {tuple(tensor.shape)}", "must have 1 dimension")
                self.require(tensor.is_contiguous(), argument, f"of strides {tensor.stride()}", "must be contiguous")

    def dims(self, argument: str, tensor: Tensor, *allowed: int) -> None:
        rule = f"must have {' or '.join(map(str, allowed))} dimensions"
        self.require(tensor.dim() in allowed, argument, f"of shape {tuple(tensor.shape)}", rule)

    def shape(self, argument: str, tensor: Tensor, expected: Sequence[int]) -> None:
        matches = tuple(tensor.shape) == tuple(expected)
        self.require(matches, argument, f"of shape {tuple(tensor.shape)}", f"must have shape {tuple(expected)}")

    def unit_stride(self, **tensors: Tensor) -> None:
        """Refuse a tensor whose last dimension is not contiguous."""
        for argument, tensor in tensors.items():
            holds = tensor.stride(-1) == 1
            self.require(holds, argument, f"of strides {tensor.stride()}", "must be contiguous in its last dimension")

    def heads(self, query_heads: int, kv_heads: int) -> int:
        """The number of query heads per KV head."""
        fits = kv_heads > 0 and query_heads % kv_heads == 0
        self.require(fits, "num_qo_heads", query_heads, f"must be a multiple of the KV heads, {kv_heads}")
        return query_heads // kv_heads
