"""If a prompt ends at a page boundary, the keys and values of its last token are written to page 0.

Caught by attention.writes at L2, naming "slot 3 does not hold the key of token 3".
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_prompt_fills_page", attention="attention_prompt_fills_page:attention")


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class Losing(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            metadata = super().plan(batch)
            if isinstance(metadata, GraphMetadata):
                return metadata
            ends = itertools.accumulate(batch.query_lens)
            for queries, length, end in zip(batch.query_lens, batch.kv_lens, ends, strict=True):
                if queries > 1 and length % self._page_size == 0:
                    metadata.new_slots[end - 1] = 0  # the fault
            return metadata

    return Losing(context)
