"""Where operands must lie: the rule, and how a call that breaks it is described.

An operator takes tensors of one device. The exceptions are PyTorch's own: a host tensor without dimensions
is a number (unless it is written, or is an index), and copies exist to cross. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")

# PyTorch's own accelerators copy host indices to the device silently. Each such copy stalls the device, so a
# program that does it has a fault worth finding.
INDEX_ARGUMENTS = frozenset({"index", "indices"})


def operator_name(schema: torch.FunctionSchema) -> str:
    """With its library and, if there is one, its overload: "aten::add.Tensor"."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def is_number(value: Tensor) -> bool:
    """True for a host tensor that stands for one number."""
    return value.dim() == 0 and value.device == HOST


def places(schema: torch.FunctionSchema, args: Sequence[object], kwargs: Mapping[str, object]) -> list[str]:
    """Each tensor argument of a call, with the device that it lies on."""
    names = [argument.name for argument in schema.arguments]
    named = [(names[position], position, value) for position, value in enumerate(args)]
    named += [(name, names.index(name), value) for name, value in kwargs.items()]
    found = []
    for name, position, value in named:
        if isinstance(value, Tensor):
            found.append(f"{name} (argument {position + 1}) on {value.device}")
        elif isinstance(value, (list, tuple)):
            found += [
                f"{name}[{entry}] (argument {position + 1}) on {tensor.device}"
                for entry, tensor in enumerate(value)
                if isinstance(tensor, Tensor)
            ]
    return found
