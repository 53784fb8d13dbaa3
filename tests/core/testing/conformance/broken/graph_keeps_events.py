"""Every replay leaves an event behind, so that one may wait for any of them.

Caught by graph.steps at L2, naming "of a captured step left".
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
    class Keeping(toy):  # type: ignore[valid-type, misc]
        def __init__(self, accelerator: Accelerator) -> None:
            super().__init__(accelerator)
            self._replayed: list[Any] = []

        def replay(self, key: GraphKey, metadata: Any) -> None:
            super().replay(key, metadata)
            self._replayed.append(self._accelerator.current_stream().record_event())  # the fault

    return Keeping


MANIFEST = manifest("graph_keeps_events", platform=with_graphs(graphs))
