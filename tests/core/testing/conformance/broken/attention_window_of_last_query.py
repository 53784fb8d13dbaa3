"""In a sliding window, attention skips the blocks of 32 keys behind the window of a row's last query, not of its first.

Caught by attention.window at L2, naming "a prompt in chunks, in a window of 5 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_window_of_last_query", attention="attention_window_of_last_query:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.attention import GraphMetadata, Metadata, Tile, ToyPagedAttention

    class Skipping(Tile):
        def visible(self, window: int | None) -> torch.Tensor:
            seen = super().visible(window)
            if window is None:
                return seen
            first = (self.positions[:, -1:] - window + 1) // 32 * 32  # the fault
            key = torch.arange(self.slots.shape[1], device=self.slots.device)
            is_own = key == self.positions[:, :, None]  # so that no query is without a key
            return seen & ((key >= first)[:, None] | is_own)[:, None, None]

    class LastQuery(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            metadata = super().plan(batch)
            return (
                metadata
                if isinstance(metadata, GraphMetadata)
                else replace(metadata, tiles=tuple(map(_skipping, metadata.tiles)))
            )

    def _skipping(tile: Tile) -> Tile:
        return Skipping(tile.rows, tile.queries, tile.tokens, tile.slots, tile.positions)

    return LastQuery(context)
