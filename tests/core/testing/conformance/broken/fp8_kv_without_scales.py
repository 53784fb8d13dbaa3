"""Keys and values in 8-bit floats are stored as if every layer had a scale of 1.

Caught by attention.fp8_kv at L2, naming "prompts with scales per layer".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

from srv_toy_device.facts import FACTS

if TYPE_CHECKING:
    import torch

    from srv.platform.facts import DeviceFacts
    from srv.platform.interface import AttentionLayer, BackendContext, KVBuffers
    from srv.specs import KVLayout
    from srv_toy_device.platform import ToyPlatform


def capabilities(device: DeviceFacts) -> frozenset[str]:
    return FACTS.capabilities(device) | {"fp8_kv"}


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from dataclasses import replace

    class OfEightBits(toy):  # type: ignore[valid-type, misc]
        """Stores the rounded values as float32: the same numbers, in more memory."""

        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            if not layout.dtype.startswith("float8"):
                return super().kv_buffers(layout, pages)
            pool = super().kv_buffers(replace(layout, dtype="float32"), pages)
            return replace(pool, layout=layout)

    return OfEightBits


MANIFEST = manifest(
    "fp8_kv_without_scales",
    facts={"capabilities": capabilities},
    platform=platform,
    attention="fp8_kv_without_scales:attention",
)


def attention(context: BackendContext) -> Any:
    from srv.platform.pools import is_float8, round_to_float8
    from srv_toy_device.attention import ToyPagedAttention

    class Rounding(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            if context.kv is not None and is_float8(context.kv.layout.dtype):
                import torch

                dtype = getattr(torch, context.kv.layout.dtype)
                k, v = (round_to_float8(x, dtype, 1.0).float() for x in (k, v))  # the fault: the layer has scales
            return super().forward(layer, q, k, v, metadata)

    return Rounding(context)
