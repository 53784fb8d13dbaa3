"""Allocating the pools of cache groups: a helper for platforms, and the call that core makes.

Owns neither memory nor a device; must not know how many pages there are, nor who holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch

from srv.dtypes import FLOAT8
from srv.errors import PlatformUnavailable
from srv.platform.interface import KVBuffers, Platform
from srv.specs import KVLayout, TensorShape, spec_name

Zeros: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def plain_pool(layout: KVLayout, pages: int, device: torch.device) -> KVBuffers:
    """The plain tensors of `layout` on a device, zeroed. `pages`: slots of a recurrent group.

    In host memory they are `untouched_zeros`. Raises InternalError for a layout that is not plain
    (`KVLayout.plain_tensors`).
    """

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    in_host_memory = device.type == untouched_zeros((0,), torch.uint8).device.type
    return pool_of(layout, layout.plain_tensors(pages), untouched_zeros if in_host_memory else zeros)


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in host memory, which the operating system provides when they are written to.

    `torch.zeros` writes every byte, which takes half a minute for the pools of an ordinary server.
    """
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)


def pool_of(layout: KVLayout, shapes: Mapping[str, TensorShape], zeros: Zeros) -> KVBuffers:
    """A pool with one tensor of each of these shapes per layer that has it, which `zeros` allocates."""

    def tensors(name: str, shape: TensorShape) -> tuple[torch.Tensor, ...]:
        dtype: torch.dtype = getattr(torch, shape.dtype)
        return tuple(zeros(shape.shape, dtype) for _ in layout.layers_of(name))

    return KVBuffers(layout, {name: tensors(name, shape) for name, shape in shapes.items()})


def is_float8(dtype: str) -> bool:
    """Whether a pool of this dtype (torch's name) holds 8-bit floats, which have scales."""
    return dtype in FLOAT8.values()


def round_to_float8(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """x / scale, rounded to 8-bit floats as `KVLayout` says."""
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-limit, limit).to(dtype)


def allocate_pool(platform: Platform, layout: KVLayout, pages: int) -> KVBuffers:
    """The platform's pool for one cache group.

    Raises PlatformUnavailable, with the names of platform and spec, if the platform does not lay out such groups.
    """
    try:
        return platform.kv_buffers(layout, pages)
    except NotImplementedError as error:
        kind = spec_name(layout.group)
        raise PlatformUnavailable(
            platform.name,
            f"it allocates no pools for {kind} cache groups{f' ({error})' if str(error) else ''}",
            "Choose another platform with --device, or another model.",
            "cache_spec",
        ) from error
