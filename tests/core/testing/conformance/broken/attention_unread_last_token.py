"""If a prompt ends at a page boundary, its last token does not read its own key and value.

Caught by attention.page_boundaries at L2, naming "reading them is at fault".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_unread_last_token", attention="attention_unread_last_token:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.attention import Tile, ToyPagedAttention

    assert context.kv is not None
    page_size = context.kv.layout.page_size

    class Short(Tile):
        def visible(self, window: int | None) -> torch.Tensor:
            last = self.positions[:, -1:]
            full = (last + 1) % page_size == 0
            key = torch.arange(self.slots.shape[1], device=self.slots.device)
            return super().visible(window) & ~(full & (key == last))[:, None, None, None]  # the fault

    class Unread(ToyPagedAttention):
        def _tile(self, *arguments: Any) -> Any:
            tile = super()._tile(*arguments)
            if tile.queries == 1:
                return tile
            return Short(tile.rows, tile.queries, tile.tokens, tile.slots, tile.positions)

    return Unread(context)
