"""`supports` answers True for a layer that it supports, instead of None.

Caught by backends.layers at L1, naming "returned True".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("supports_by_bool", attention="supports_by_bool:attention")


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    class ByBool(ToyPagedAttention):
        def supports(self, layer: AttentionLayer) -> Any:
            return super().supports(layer) is None  # the fault

    return ByBool(context)
