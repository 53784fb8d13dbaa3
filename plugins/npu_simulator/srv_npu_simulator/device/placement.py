"""Where operands of PyTorch's own operators must lie: the rule, and the error when it is broken.

They take tensors of one device. The exceptions are PyTorch's: a host tensor without dimensions is a number (unless
it is written, or is an index), and copies exist to cross. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# A host index would have to be copied first, which stalls the device: a program that does it has a fault.
INDEX_ARGUMENTS = frozenset({"index", "indices"})


def is_number(value: Tensor) -> bool:
    """True for a host tensor that stands for one number."""
    return value.dim() == 0 and value.is_cpu


def mixed_devices(schema: torch.FunctionSchema, args: Sequence[object], kwargs: Mapping[str, object]) -> RuntimeError:
    """The error for operands on several devices: names the operator, and each tensor argument's place."""
    names = [argument.name for argument in schema.arguments]
    places = []
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, Tensor):
            places.append(f"{name} on {value.device}")
        elif isinstance(value, (list, tuple)):
            places += [f"{name}[{i}] on {one.device}" for i, one in enumerate(value) if isinstance(one, Tensor)]
    operator = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return RuntimeError(
        f"{operator}: expected all tensors to be on the same device, but was given {', '.join(places)}. "
        'Move them with .to("npu:0") first; only 0-dim host tensors that are no index, and copies, may mix.'
    )
