"""Captured steps: the platform's side of `srv.platform.interface.Graphs`, over the accelerator's own graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from srv_toy_device.attention import GraphMetadata
from srv_toy_device.device import Accelerator, Graph


class ToyGraphs:
    """Graphs by key, all in one memory: core replays one at a time and keeps no result past the next."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._memory = accelerator.graph_memory()
        self._graphs: dict[int, Graph] = {}

    def capture(self, key: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        run()
        graph = self._accelerator.Graph()
        with self._accelerator.graph(graph, self._memory):
            output = run()
        self._graphs[key] = graph
        return output

    def replay(self, key: int, metadata: GraphMetadata) -> None:
        """The lengths were host numbers when attention was captured; without the update they would stay those."""
        graph = self._graphs[key]
        graph.update(lengths=metadata.lengths)
        graph.replay()
