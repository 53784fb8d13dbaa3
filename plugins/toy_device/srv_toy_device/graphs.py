"""Captured steps: `srv.platform.interface.Graphs` on top of the accelerator's own graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from srv.platform.interface import GraphKey
from srv_toy_device.attention import GraphMetadata
from srv_toy_device.device import Accelerator, Graph


class ToyGraphs:
    """Graphs by key, in one memory pool: core replays one at a time and reads each result before the next replay."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._memory = accelerator.graph_memory()
        self._graphs: dict[GraphKey, Graph] = {}

    def capture(self, key: GraphKey, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        run()
        graph = self._accelerator.Graph()
        with self._accelerator.graph(graph, self._memory):
            output = run()
        self._graphs[key] = graph
        return output

    @contextmanager
    def piece(self) -> Iterator[Callable[[], None]]:
        """See `srv.platform.interface.Platform`. What later pieces read is not freed before they have read it."""
        graph = self._accelerator.Graph()
        with self._accelerator.graph(graph, self._memory):
            yield graph.replay

    def replay(self, key: GraphKey, metadata: Sequence[GraphMetadata]) -> None:
        """A capture records the lengths, which are host integers; without the update a replay would use those.

        All cache groups have the same lengths.
        """
        graph = self._graphs[key]
        graph.update(lengths=metadata[0].lengths)
        graph.replay()
