"""The keys of a row are divided into parts of 256, and the first part is read again instead of the second.

Caught by attention.long_rows at L2, naming "tokens and a short one".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_first_part_twice", attention="attention_first_part_twice:attention")
PART = 256


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import ToyPagedAttention

    class FirstPartTwice(ToyPagedAttention):
        def _tile(self, *args: Any) -> Any:
            tile = super()._tile(*args)
            slots = tile.slots.clone()
            slots[:, PART:] = tile.slots[:, : max(0, slots.shape[1] - PART)]  # the fault
            return replace(tile, slots=slots)

    return FirstPartTwice(context)
