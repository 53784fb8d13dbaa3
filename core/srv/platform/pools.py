"""Allocating the pools of cache groups: a helper for platforms, and the call that core makes.

Owns neither memory nor a device; must not know how many pages there are, nor who holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from srv.errors import PlatformUnavailable
from srv.platform.interface import KVBuffers, Platform
from srv.specs import KVLayout, TensorShape, spec_name

Zeros: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def plain_pool(layout: KVLayout, pages: int, device: torch.device) -> KVBuffers:
    """The plain tensors of `layout` on a device, zeroed. `pages`: slots of a recurrent group.

    Raises InternalError for a layout that is not plain (`KVLayout.plain_tensors`).
    """

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return pool_of(layout, layout.plain_tensors(pages), zeros)


def pool_of(layout: KVLayout, shapes: Mapping[str, TensorShape], zeros: Zeros) -> KVBuffers:
    """A pool with one tensor of each of these shapes per layer, which `zeros` allocates."""

    def tensors(shape: TensorShape) -> tuple[torch.Tensor, ...]:
        dtype: torch.dtype = getattr(torch, shape.dtype)
        return tuple(zeros(shape.shape, dtype) for _ in layout.group.layers)

    return KVBuffers(layout, {name: tensors(shape) for name, shape in shapes.items()})


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
