"""Heads of 128 take another code path, where a later chunk of a prompt attends only to itself.

Caught by attention.extend at L2, naming "heads of 128".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_forgets_large_heads", attention="attention_forgets_large_heads:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.attention import GraphMetadata, Metadata, Tile, ToyPagedAttention

    class Forgetful(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            metadata = super().plan(batch)
            if isinstance(metadata, GraphMetadata) or context.kv is None or context.kv.layout.group.key_dim != 128:
                return metadata
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
