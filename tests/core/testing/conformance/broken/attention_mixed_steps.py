"""In a step that also computes prompts, a row of one query attends only to its own token.

Caught by attention.mixed at L2, naming "prompts and output".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_mixed_steps", attention="attention_mixed_steps:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import GraphMetadata, Metadata, Tile, ToyPagedAttention

    class Separate(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            metadata = super().plan(batch)
            if isinstance(metadata, GraphMetadata) or max(batch.query_lens) == 1:
                return metadata
            return replace(metadata, tiles=tuple(map(_own_token, metadata.tiles)))

    class OwnToken(Tile):
        def visible(self, window: int | None) -> torch.Tensor:
            return super().visible(1)  # the fault

    def _own_token(tile: Tile) -> Tile:
        if tile.queries > 1:
            return tile
        return OwnToken(tile.rows, tile.queries, tile.tokens, tile.slots, tile.positions)

    return Separate(context)
