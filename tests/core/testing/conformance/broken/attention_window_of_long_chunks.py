"""In a sliding window, queries of chunks of more than 32 tokens that continue a prompt see one token too many.

Caught by attention.window at L2, naming "a prompt in chunks, in a window of 5 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_window_of_long_chunks", attention="attention_window_of_long_chunks:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.attention import Tile, ToyPagedAttention

    class Wider(Tile):
        def visible(self, window: int | None) -> torch.Tensor:
            if window is None:
                return super().visible(window)
            continues = (self.positions[:, 0] > 0)[:, None, None, None, None]
            return torch.where(continues, super().visible(window + 1), super().visible(window))  # the fault

    class LongChunks(ToyPagedAttention):
        def _tile(self, *arguments: Any) -> Any:
            tile = super()._tile(*arguments)
            if tile.queries <= 32:
                return tile
            return Wider(tile.rows, tile.queries, tile.tokens, tile.slots, tile.positions)

    return LongChunks(context)
