"""Devices of operands: the rule, and the description of a call that violates it.

An operator takes tensors of one device. The exceptions are those of PyTorch: a 0-dim host tensor is a scalar (unless it
is written, or is an index), and copies. This module runs no operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")

# PyTorch's own accelerators silently copy host indices to the device. Each such copy stalls the device, so it is an
# error here.
INDEX_ARGUMENTS = frozenset({"index", "indices"})


def operator_name(schema: torch.FunctionSchema) -> str:
    """The name with library and, if there is one, overload: "aten::add.Tensor"."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def is_host_scalar(value: Tensor) -> bool:
    """True for a 0-dim host tensor."""
    return value.dim() == 0 and value.device == HOST


def tensor_locations(schema: torch.FunctionSchema, args: Sequence[object], kwargs: Mapping[str, object]) -> list[str]:
    """Each tensor argument of a call, with its device."""
    names = [argument.name for argument in schema.arguments]
    parameters = [(names[position], position, value) for position, value in enumerate(args)]
    parameters += [(name, names.index(name), value) for name, value in kwargs.items()]
    places = []
    for name, position, value in parameters:
        if isinstance(value, Tensor):
            places.append(f"{name} (argument {position + 1}) on {value.device}")
        elif isinstance(value, (list, tuple)):
            places += [
                f"{name}[{entry}] (argument {position + 1}) on {tensor.device}"
                for entry, tensor in enumerate(value)
                if isinstance(tensor, Tensor)
            ]
    return places
