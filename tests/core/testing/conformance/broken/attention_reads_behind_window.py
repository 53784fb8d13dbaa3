"""Attention reads the pages behind a sliding window and gives them a weight of zero.

Caught by attention.window_pages at L2, naming "NaN in pages behind a window of 1 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_reads_behind_window", attention="attention_reads_behind_window:attention")


def attention(context: BackendContext) -> Any:
    from srv_toy_device import attention as toy

    class Reading(toy.Tile):
        def slots_read(self, window: int | None) -> Any:
            return self.slots  # the fault

    class Careless(toy.ToyPagedAttention):
        def _tile(self, *arguments: Any) -> Any:
            tile = super()._tile(*arguments)
            return Reading(tile.rows, tile.queries, tile.tokens, tile.slots, tile.positions)

    return Careless(context)
