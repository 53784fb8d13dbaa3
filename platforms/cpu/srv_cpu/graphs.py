"""Captured steps: implements `srv.platform.interface.Graphs` with graphs of native kernel calls.

For few rows, the kernels of a step take less time than Python needs to call them; a graph calls them from C++.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from srv.platform.interface import GraphKey
from srv_kernels.cpu.captured_graph import CapturedGraph, GraphMemoryPool, NotCapturable

logger = logging.getLogger(__name__)


class CpuGraphs:
    """Replayable steps by key. All graphs share a memory pool, since core keeps no result past the next replay.

    A step that consists mostly of torch operators, as transformers models do, runs eagerly instead: a graph would take
    as long, and the memory of all intermediate results. It reads the same storages, so that the results are the same.
    """

    def __init__(self) -> None:
        self._pool = GraphMemoryPool()
        self._replays: dict[GraphKey, Callable[[], object]] = {}

    def capture(self, key: GraphKey, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        graph = CapturedGraph(self._pool)
        reason = ""
        try:
            with graph:
                output = run()
        except NotCapturable as error:
            reason, output = str(error), run()
        if not reason and graph.torch_calls > graph.native_calls:
            reason = f"{graph.torch_calls} of its operators are torch's, {graph.native_calls} native"
        if reason:
            logger.info("%s are not captured and run eagerly: %s", key, reason)
        self._replays[key] = run if reason else graph.replay
        return output

    def replay(self, key: GraphKey, metadata: Sequence[object]) -> None:
        """`plan` has already copied the lengths to where the captured attention reads them."""
        self._replays[key]()
