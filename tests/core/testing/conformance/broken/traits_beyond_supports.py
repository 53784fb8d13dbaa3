"""The spec has the trait soft_cap, but the backend refuses layers with a soft cap.

Caught by backends.layers at L1, naming "its spec accepts a layer with a soft cap of 3.0".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("traits_beyond_supports", attention="traits_beyond_supports:attention")


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    class Uncapped(ToyPagedAttention):
        def supports(self, layer: AttentionLayer) -> str | None:
            return super().supports(layer) if layer.soft_cap is None else "it caps no scores"  # the fault

    return Uncapped(context)
