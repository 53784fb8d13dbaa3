"""All states of a recurrent layer are views of one buffer that is as large as the largest.

Caught by pool.cache_specs at L1, naming "share memory".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import KVBuffers
    from srv.specs import KVLayout, TensorShape
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    import math
    from dataclasses import replace

    import torch

    from srv.dtypes import item_size
    from srv.specs import Recurrent

    class Shared(toy):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            if not isinstance(layout.group, Recurrent):
                return super().kv_buffers(layout, pages)
            shapes = layout.plain_tensors(pages)
            sizes = [math.prod(shape.shape) * item_size(shape.dtype) for shape in shapes.values()]
            buffers = [torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device(0)) for _ in layout.group.layers]
            tensors = {name: tuple(_view(buffer, shape) for buffer in buffers) for name, shape in shapes.items()}
            return replace(super().kv_buffers(layout, 0), tensors=tensors)

    return Shared


def _view(buffer: torch.Tensor, shape: TensorShape) -> torch.Tensor:
    import math

    import torch

    dtype = getattr(torch, shape.dtype)
    begin = 0  # the fault: every state begins here
    return buffer[begin : begin + math.prod(shape.shape) * dtype.itemsize].view(dtype).view(shape.shape)


MANIFEST = manifest("pool_states_share", platform=platform)
