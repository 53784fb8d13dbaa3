"""The toy's attention with results that are wrong in some calls only, and with keys and values of 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from srv_toy_device.facts import FACTS

if TYPE_CHECKING:
    import torch

    from srv.platform.facts import DeviceFacts
    from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext, KVBuffers
    from srv.specs import KVLayout
    from srv_toy_device.platform import ToyPlatform


@dataclass(frozen=True)
class Call:
    """One call of `forward`. batch: what was planned last, which is the step of this call."""

    layer: AttentionLayer
    batch: AttentionBatch
    layout: KVLayout

    @property
    def captured(self) -> bool:
        return self.batch.graph is not None

    @property
    def sharing(self) -> int:
        """The query heads that share a KV head."""
        return self.layer.heads // self.layer.kv_heads


def wrong_where(context: BackendContext, condition: Callable[[Call], bool]) -> Any:
    """The toy's attention, which leaves the first row of a result at zero where `condition` is true."""
    from srv_toy_device.attention import ToyPagedAttention

    class Wrong(ToyPagedAttention):
        planned: AttentionBatch

        def plan(self, batch: AttentionBatch) -> Any:
            self.planned = batch
            return super().plan(batch)

        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            out = super().forward(layer, q, k, v, metadata)
            assert context.kv is not None
            if condition(Call(layer, self.planned, context.kv.layout)):
                out[:1] = 0
            return out

    return Wrong(context)


def rounding(context: BackendContext, rounded: Callable[[Call, torch.Tensor, float], torch.Tensor]) -> Any:
    """The toy's attention over a pool of `of_8_bits`: `rounded(call, x, scale)` is what is stored of keys or values."""
    from srv_toy_device.attention import ToyPagedAttention

    class Rounding(ToyPagedAttention):
        planned: AttentionBatch

        def plan(self, batch: AttentionBatch) -> Any:
            self.planned = batch
            return super().plan(batch)

        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            kv = context.kv
            if kv is not None and (kv.layout.dtype == "int8" or kv.layout.dtype.startswith("float8")):
                call, scales = Call(layer, self.planned, kv.layout), kv.scales(layer.index)
                k, v = rounded(call, k, scales.key), rounded(call, v, scales.value)
            return super().forward(layer, q, k, v, metadata)

    return Rounding(context)


def of_8_bits(capability: str) -> dict[str, Any]:
    """The arguments of `toy_variant.manifest` for a platform that declares the capability.

    It stores the rounded values as float32: the same numbers, in more memory.
    """

    def capabilities(device: DeviceFacts) -> frozenset[str]:
        return FACTS.capabilities(device) | {capability}

    def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
        from dataclasses import replace

        class OfEightBits(toy):  # type: ignore[valid-type, misc]
            def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
                if layout.dtype != "int8" and not layout.dtype.startswith("float8"):
                    return super().kv_buffers(layout, pages)
                pool = super().kv_buffers(replace(layout, dtype="float32"), pages)
                return replace(pool, layout=layout)

        return OfEightBits

    return {"facts": {"capabilities": capabilities}, "platform": platform}
