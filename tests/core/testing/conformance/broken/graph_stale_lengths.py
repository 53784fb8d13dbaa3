"""A replayed step uses the lengths of the captured step.

Caught by graph.lengths at L2, naming "replay with grown lengths".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_graphs import with_graphs
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import GraphKey
    from srv_toy_device.graphs import ToyGraphs


def graphs(toy: type[ToyGraphs]) -> type[ToyGraphs]:
    class Stale(toy):  # type: ignore[valid-type, misc]
        def replay(self, key: GraphKey, metadata: Any) -> None:
            self._graphs[key].replay()  # the fault: nothing is updated first

    return Stale


MANIFEST = manifest("graph_stale_lengths", platform=with_graphs(graphs))
