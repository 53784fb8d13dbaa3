"""The tokens of a prompt attend to later tokens.

Caught by attention.single_page at L2, naming "prompts within one page".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_not_causal", attention="attention_not_causal:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import GraphMetadata, Metadata, Tile, ToyPagedAttention

    class Looking(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            metadata = super().plan(batch)
            if isinstance(metadata, GraphMetadata):
                return metadata
            return replace(metadata, tiles=tuple(map(_ahead, metadata.tiles)))

    def _ahead(tile: Tile) -> Tile:
        last = tile.positions[:, -1:].expand_as(tile.positions)  # the fault
        return replace(tile, positions=last)

    return Looking(context)
