"""Only the largest captured step uses its own lengths when it is replayed.

Caught by graph.row_counts at L2, naming "replay of two rows".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_graphs import with_graphs
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import GraphKey
    from srv_toy_device.graphs import ToyGraphs


def graphs(toy: type[ToyGraphs]) -> type[ToyGraphs]:
    class Forgetting(toy):  # type: ignore[valid-type, misc]
        def replay(self, key: GraphKey, metadata: Any) -> None:
            if key == max(self._graphs):
                super().replay(key, metadata)
            else:
                self._graphs[key].replay()  # the fault: nothing is updated first

    return Forgetting


MANIFEST = manifest("graph_smaller_steps_stale", platform=with_graphs(graphs))
