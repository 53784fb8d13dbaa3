"""Attention grows one buffer of the device by a part for every step.

Caught by attention.steps at L2, naming "bytes behind".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_keeps_buffers", attention="attention_keeps_buffers:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class Growing(ToyPagedAttention):
        def __init__(self, context: BackendContext) -> None:
            super().__init__(context)
            self._scratch = torch.zeros(0, dtype=torch.uint8, device=context.device)

        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            self._scratch = torch.cat((self._scratch, self._scratch.new_zeros(1 << 18)))  # the fault
            return super().plan(batch)

    return Growing(context)
