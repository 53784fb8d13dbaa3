"""Captured steps of all cache groups write to the slots in one buffer per row count, which each group's plan fills.

Caught by graph.groups at L2, naming "replay of two cache groups".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("graph_slots_of_all_groups", attention="graph_slots_of_all_groups:attention")
_SLOTS: dict[int, Any] = {}


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    class OneBuffer(ToyPagedAttention):
        def __init__(self, context: BackendContext) -> None:
            super().__init__(context)
            self._new_slots = _SLOTS  # the fault

    return OneBuffer(context)
