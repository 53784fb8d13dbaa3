"""Attention assumes that the pages of a row are contiguous in the pool, which fails when freed pages are reused.

Caught by attention.several_pages at L2, naming "over several pages".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_contiguous_pages", attention="attention_contiguous_pages:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.attention import ToyPagedAttention

    assert context.kv is not None
    last = len(context.kv.keys[0]) - 1

    class SideBySide(ToyPagedAttention):
        def _tile(self, page_table: torch.Tensor, *rest: Any) -> Any:
            steps = torch.arange(page_table.shape[1], device=page_table.device, dtype=page_table.dtype)
            return super()._tile((page_table[:, :1] + steps).clamp(max=last), *rest)  # the fault

    return SideBySide(context)
