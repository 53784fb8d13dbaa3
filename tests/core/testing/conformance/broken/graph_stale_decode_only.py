"""A backend of decode steps alone keeps the lengths of the captured step in its metadata.

Caught by graph.lengths at L2, naming "one_role (decode)".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_roles import DECODE, with_role

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = with_role("graph_stale_decode_only", DECODE, "graph_stale_decode_only:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import GraphMetadata, ToyPagedAttention

    class Stale(ToyPagedAttention):
        captured: dict[int, tuple[int, ...]]

        def plan(self, batch: AttentionBatch) -> Any:
            planned = super().plan(batch)
            if not isinstance(planned, GraphMetadata):
                return planned
            self.captured = getattr(self, "captured", {})
            lengths = self.captured.setdefault(len(planned.lengths), planned.lengths)  # the fault
            return replace(planned, lengths=lengths)

    return Stale(context)
