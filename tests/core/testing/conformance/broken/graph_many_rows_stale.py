"""A replayed step of more than 32 rows uses the lengths of the captured step.

Caught by graph.row_counts at L2, naming "72 rows".
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
            if key.rows <= 32:
                super().replay(key, metadata)
            else:
                self._graphs[key].replay()  # the fault: nothing is updated first

    return Stale


MANIFEST = manifest("graph_many_rows_stale", platform=with_graphs(graphs))
