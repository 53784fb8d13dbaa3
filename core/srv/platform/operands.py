"""What communicators do with the tensors of collective operations: checks, each of which raises ValueError; bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def require_contiguous(operation: str, tensor: Tensor) -> None:
    """An operation that replaces the values of a tensor takes a contiguous one."""
    if not tensor.is_contiguous():
        raise ValueError(f"{operation} needs a contiguous tensor, not one with strides {tensor.stride()}")


def rows_per_member(operation: str, tensor: Tensor, size: int) -> int:
    """How many rows of `tensor` each of `size` members has."""
    if not tensor.dim() or len(tensor) % size:
        raise ValueError(
            f"{operation} divides the first axis among {size} ranks, and a tensor of shape {tuple(tensor.shape)} "
            "cannot be divided so"
        )
    return len(tensor) // size


def require_splits(tensor: Tensor, send: Sequence[int], receive: Sequence[int], size: int) -> None:
    """Numbers of rows for each of `size` members; those of `send` add up to the rows of `tensor`."""
    for name, rows in (("send", send), ("receive", receive)):
        if len(rows) != size or min(rows) < 0:
            raise ValueError(f"all_to_all_uneven needs a number of rows for each of {size} ranks: `{name}` is {rows}")
    if not tensor.dim() or len(tensor) != sum(send):
        raise ValueError(
            f"all_to_all_uneven sends {sum(send)} rows, and was given a tensor of shape {tuple(tensor.shape)}"
        )


def require_member(operation: str, member: int, size: int, excluded: int = -1) -> None:
    """`member` is a rank of a group of `size` members, and not the rank `excluded`."""
    if not 0 <= member < size or member == excluded:
        others = "" if excluded < 0 else f" other than {excluded}"
        raise ValueError(f"{operation} needs a rank from 0 to {size - 1}{others}, not {member}")


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in one dimension, for libraries that do not know its dtype."""
    return tensor.view(-1).view(torch.uint8)
