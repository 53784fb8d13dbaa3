"""A replay that starts while the previous one runs uses the lengths of the previous one.

Caught by graph.back_to_back at L2, naming "replay while the previous one runs".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_graphs import with_graphs
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import GraphKey
    from srv_toy_device.device import Accelerator
    from srv_toy_device.graphs import ToyGraphs


def graphs(toy: type[ToyGraphs]) -> type[ToyGraphs]:
    class Racing(toy):  # type: ignore[valid-type, misc]
        def __init__(self, accelerator: Accelerator) -> None:
            super().__init__(accelerator)
            self._replayed: dict[int, Any] = {}

        def replay(self, key: GraphKey, metadata: Any) -> None:
            if key not in self._replayed or self._replayed[key].query():
                super().replay(key, metadata)
            else:
                self._graphs[key].replay()  # the fault: the update is lost, because nothing waited
            self._replayed[key] = self._accelerator.current_stream().record_event()

    return Racing


MANIFEST = manifest("graph_loses_updates", platform=with_graphs(graphs))
