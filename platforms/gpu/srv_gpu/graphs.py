"""Captured steps over graphs with the API of `torch.cuda.CUDAGraph`.

    capture   run twice (kernels are compiled and loaded, libraries allocate their workspaces), then once recorded
    replay    the recorded kernels; they read lengths, page tables and slots at the addresses to which the attention
              backends' `plan` has copied those of this step

All graphs and pieces of a worker share one memory pool, since core keeps no result past the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from srv.errors import InternalError
from srv.platform.interface import GraphKey
from srv_gpu.accelerator import Accelerator

_WARM_UPS = 2


class GpuGraphs:
    """Implements `srv.platform.interface.Graphs`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._graphs: dict[GraphKey, Any] = {}
        self._pool: Any = None

    def capture(self, key: GraphKey, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See `srv.platform.interface.Graphs`."""
        module = self._accelerator.module
        for _ in range(_WARM_UPS):
            run()
        module.synchronize()
        graph = self._accelerator.graph_class()
        with module.graph(graph, pool=self._shared_pool()):
            output = run()
        self._graphs[key] = graph
        return output

    @contextmanager
    def piece(self) -> Iterator[Callable[[], None]]:
        """See `srv.platform.interface.Platform.graph_piece`. It is captured in a stream of its own, like a graph."""
        graph = self._accelerator.graph_class()
        with self._accelerator.module.graph(graph, pool=self._shared_pool()):
            yield graph.replay

    def _shared_pool(self) -> Any:
        if self._pool is None:
            self._pool = self._accelerator.module.graph_pool_handle()
        return self._pool

    def replay(self, key: GraphKey, metadata: Sequence[Any]) -> None:
        """See `srv.platform.interface.Graphs`. Raises InternalError if nothing was captured under this key."""
        graph = self._graphs.get(key)
        if graph is None:
            raise InternalError(f"cannot replay {key}: no graph was captured for them")
        graph.replay()
