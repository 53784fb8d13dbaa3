"""Validation of operators' arguments: the format of errors, and rules that many operators share.

Every message begins with the operator and the argument, followed by the value and the rule. The rules look only at
shapes, dtypes and host values, so they apply to a device tensor and to its host view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from srv.testing.simulated_device.tensors import is_device_tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)


def refuse(operator: str, argument: str, value: str, rule: str) -> NoReturn:
    """Raise RuntimeError: `argument` of `operator` is `value`, which violates `rule`."""
    raise RuntimeError(f"{operator}: {argument}: is {value}, {rule}")


class Rules:
    """The rules for one operator."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def require(self, holds: bool, argument: str, value: object, rule: str) -> None:
        """Refuse unless `holds`."""
        if not holds:
            refuse(self.operator, argument, str(value), rule)

    def dtype(self, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
        names = " or ".join(str(one).removeprefix("torch.") for one in allowed)
        self.require(tensor.dtype in allowed, argument, tensor.dtype, f"must be {names}")

    def same_dtype(self, argument: str, tensor: Tensor, of: str, dtype: torch.dtype) -> None:
        self.require(tensor.dtype is dtype, argument, tensor.dtype, f"must have the dtype of {of}, {dtype}")

    def contiguous(self, argument: str, tensor: Tensor) -> None:
        value = f"not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
        self.require(tensor.is_contiguous(), argument, value, "must be contiguous; call contiguous() first")

    def dims(self, argument: str, tensor: Tensor, *allowed: int) -> None:
        rule = f"must have {' or '.join(str(one) for one in allowed)} dimensions"
        self.require(tensor.dim() in allowed, argument, f"of shape {tuple(tensor.shape)}", rule)

    def shape(self, argument: str, tensor: Tensor, expected: Sequence[int], why: str = "") -> None:
        rule = f"must have shape {tuple(expected)}{why and ': ' + why}"
        self.require(tuple(tensor.shape) == tuple(expected), argument, f"of shape {tuple(tensor.shape)}", rule)

    def absent(self, **values: object) -> None:
        """Refuse arguments of the real operator that are not simulated."""
        for argument, value in values.items():
            if value is not None:
                refuse(self.operator, argument, "given", "but the simulator has no reference for it: leave it out")


def check_placement(operator: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a tensor that is not on the card: these operators accept no host tensors, not even scalars."""
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and not is_device_tensor(tensor):
                refuse(operator, name, f"on {tensor.device}", 'must be on npu:0; move it with .to("npu:0")')
