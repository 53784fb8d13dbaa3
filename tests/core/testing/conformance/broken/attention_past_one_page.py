"""Attention reads a row's first page instead of all further pages.

Caught by attention.several_pages at L2, naming "over several pages".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_past_one_page", attention="attention_past_one_page:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.attention import ToyPagedAttention

    class FirstPageOnly(ToyPagedAttention):
        def _tile(self, page_table: torch.Tensor, *rest: Any) -> Any:
            return super()._tile(page_table[:, :1].repeat(1, page_table.shape[1]), *rest)  # the fault

    return FirstPageOnly(context)
