"""In captured steps, a sliding window has at most 128 tokens.

Caught by graph.groups at L2, naming "a window of 130 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("graph_window_of_128", attention="graph_window_of_128:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv.platform.interface import AttentionLayer
    from srv_toy_device.attention import GraphMetadata, ToyPagedAttention

    class Narrow(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            if layer.window is not None and isinstance(metadata, GraphMetadata):
                layer = replace(layer, window=min(layer.window, 128))  # the fault
            return super().forward(layer, q, k, v, metadata)

    return Narrow(context)
