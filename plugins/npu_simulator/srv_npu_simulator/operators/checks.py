"""What operators refuse: one way to say it, and the rules that many of them share.

Every text begins with the operator's name and the argument's, then says which value it has and which it must have.
The rules look at shapes, dtypes and host values only, so they hold for a device tensor and for its host view alike.
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
    """RuntimeError: `operator`'s `argument` is `value`, and the rule is `rule`."""
    raise RuntimeError(f"{operator}: {argument}: is {value}, {rule}")


class Rules:
    """The checks of one operator."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def that(self, holds: bool, argument: str, value: object, rule: str) -> None:
        """Refuse unless `holds`."""
        if not holds:
            refuse(self.operator, argument, str(value), rule)

    def dtype(self, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
        names = " or ".join(str(one).removeprefix("torch.") for one in allowed)
        self.that(tensor.dtype in allowed, argument, tensor.dtype, f"must be {names}")

    def same_dtype(self, argument: str, tensor: Tensor, of: str, dtype: torch.dtype) -> None:
        self.that(tensor.dtype is dtype, argument, tensor.dtype, f"must have the dtype of {of}, {dtype}")

    def contiguous(self, argument: str, tensor: Tensor) -> None:
        described = f"not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
        self.that(tensor.is_contiguous(), argument, described, "must be contiguous; call contiguous() first")

    def dims(self, argument: str, tensor: Tensor, *allowed: int) -> None:
        rule = f"must have {' or '.join(str(one) for one in allowed)} dimensions"
        self.that(tensor.dim() in allowed, argument, f"of shape {tuple(tensor.shape)}", rule)

    def shape(self, argument: str, tensor: Tensor, expected: Sequence[int], why: str = "") -> None:
        rule = f"must have shape {tuple(expected)}{why and ': ' + why}"
        self.that(tuple(tensor.shape) == tuple(expected), argument, f"of shape {tuple(tensor.shape)}", rule)

    def absent(self, **values: object) -> None:
        """Refuse what the real operator takes and this one has no reference for."""
        for argument, value in values.items():
            if value is not None:
                refuse(self.operator, argument, "given", "but the simulator has no reference for it: leave it out")


def check_placement(operator: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a tensor that is not on the card: these operators take no host tensor, not even a number."""
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, Tensor) and not is_device_tensor(value):
            refuse(operator, name, f"on {value.device}", 'must be on npu:0; move it with .to("npu:0")')
