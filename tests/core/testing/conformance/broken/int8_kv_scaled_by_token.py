"""int8 keys and values have one scale for all heads of a token.

Caught by attention.int8_kv at L2, naming "keys and values of int8".
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
    return FACTS.capabilities(device) | {"int8_kv"}


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from dataclasses import replace

    class OfEightBits(toy):  # type: ignore[valid-type, misc]
        """Stores the dequantized values as float32: the same numbers, in more memory."""

        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            if layout.dtype != "int8":
                return super().kv_buffers(layout, pages)
            pool = super().kv_buffers(replace(layout, dtype="float32"), pages)
            return replace(pool, layout=layout)

    return OfEightBits


MANIFEST = manifest(
    "int8_kv_scaled_by_token",
    facts={"capabilities": capabilities},
    platform=platform,
    attention="int8_kv_scaled_by_token:attention",
)


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    def rounded(x: torch.Tensor) -> torch.Tensor:
        unit = x.float().abs().amax((1, 2), keepdim=True) / 127  # the fault: of [tokens, heads, dim], not of dim alone
        return (x.float() / unit).round() * unit

    class Rounding(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            if context.kv is not None and context.kv.layout.dtype == "int8":
                k, v = rounded(k), rounded(v)
            return super().forward(layer, q, k, v, metadata)

    return Rounding(context)
