"""Where operands must lie: the rule, and the error when it is broken.

An operator takes tensors of one device. The exceptions are PyTorch's own: a host tensor without dimensions
is a number (unless it is written, or is an index), and copies exist to cross. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# PyTorch's CUDA backend copies host indices to the device silently. Each such copy stalls the device, so a
# program that does it has a fault worth finding.
INDEX_ARGUMENTS = frozenset({"index", "indices"})


def is_number(value: Tensor) -> bool:
    """True for a host tensor that stands for one number."""
    return value.dim() == 0 and value.is_cpu


def mixed_devices(schema: torch.FunctionSchema, args: Sequence[object], kwargs: Mapping[str, object]) -> RuntimeError:
    """The error for operands on several devices: names the operator, and each tensor argument's place."""
    names = [argument.name for argument in schema.arguments]
    named = [(names[position], position, value) for position, value in enumerate(args)]
    named += [(name, names.index(name), value) for name, value in kwargs.items()]
    places = []
    for name, position, value in named:
        if isinstance(value, Tensor):
            places.append(f"{name} (argument {position + 1}) on {value.device}")
        elif isinstance(value, (list, tuple)):
            places += [
                f"{name}[{entry}] (argument {position + 1}) on {tensor.device}"
                for entry, tensor in enumerate(value)
                if isinstance(tensor, Tensor)
            ]
    operator = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return RuntimeError(
        f"Expected all tensors to be on the same device, but {operator} was given {', '.join(places)}. "
        "Move them to one device first; only host numbers (0-dim tensors that are no index) and copies may mix."
    )
