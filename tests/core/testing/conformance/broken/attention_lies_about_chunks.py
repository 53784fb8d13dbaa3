"""The plugin declares chunked_prefill, but the first query of a later chunk attends only to the chunk.

Caught by attention.extend at L2, naming "a chunk of a prompt".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_lies_about_chunks", attention="attention_lies_about_chunks:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.attention import GraphMetadata, Metadata, Tile, ToyPagedAttention

    class Forgetful(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            metadata = super().plan(batch)
            if isinstance(metadata, GraphMetadata) or list(batch.query_lens) == list(batch.kv_lens):
                return metadata  # no later chunk
            return replace(metadata, tiles=tuple(_own_chunk(tile) for tile in metadata.tiles))

    class OwnChunk(Tile):
        def visible(self, window: int | None) -> torch.Tensor:
            key = torch.arange(self.slots.shape[1], device=self.slots.device)
            return super().visible(window) & (key >= self.positions[:, :1, None])[:, None, None]  # the fault

    def _own_chunk(tile: Tile) -> Tile:
        if tile.queries == 1:
            return tile
        return OwnChunk(tile.rows, tile.queries, tile.tokens, tile.slots, tile.positions)

    return Forgetful(context)
