"""A replayed step of eight rows uses the lengths of the captured step.

It declares no 8-bit weights, because their check replays steps too. The kit's own captured steps have other
numbers of rows, so only engine.graphs can catch it.

Caught by engine.graphs at L3, naming "output from captured graphs".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_graphs import with_graphs
from toy_variant import manifest

from srv_toy_device.facts import capabilities

if TYPE_CHECKING:
    from srv.platform.facts import DeviceFacts
    from srv.platform.interface import GraphKey
    from srv_toy_device.graphs import ToyGraphs


def graphs(toy: type[ToyGraphs]) -> type[ToyGraphs]:
    class Stale(toy):  # type: ignore[valid-type, misc]
        def replay(self, key: GraphKey, metadata: Any) -> None:
            if key.rows != 8:
                super().replay(key, metadata)
            else:
                self._graphs[key].replay()  # the fault: nothing is updated first

    return Stale


def without_w8a8(device: DeviceFacts) -> frozenset[str]:
    return capabilities(device) - {"w8a8"}


MANIFEST = manifest("graph_large_steps_stale", platform=with_graphs(graphs), facts={"capabilities": without_w8a8})
