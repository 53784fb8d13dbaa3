"""Captured steps: the platform's side of `srv.platform.interface.Graphs`, by graphs of native kernel calls.

A step's kernels take less time than Python needs to call them, at few rows; a graph calls them from C++.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from srv_cpu.native_attention import AttentionMetadata
from srv_kernels.cpu.captured_graph import CapturedGraph, GraphMemoryPool, NotCapturable

logger = logging.getLogger(__name__)


class CpuGraphs:
    """What replays a step, by key: graphs over one pool, as core keeps no result past the next replay.

    A step that is mostly torch's own operators, as transformers' models are, is called again instead: on a graph
    they would take as long, and the memory of all that they make. It reads the same storages, so the outcome is the
    same.
    """

    def __init__(self) -> None:
        self._pool = GraphMemoryPool()
        self._replays: dict[int, Callable[[], object]] = {}

    def capture(self, key: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        graph = CapturedGraph(self._pool)
        why = ""
        try:
            with graph:
                output = run()
        except NotCapturable as error:
            why, output = str(error), run()
        if not why and graph.torch_calls > graph.native_calls:
            why = f"{graph.torch_calls} of its operators are torch's, {graph.native_calls} native"
        if why:
            logger.info("the step of %d rows is not recorded but called again: %s", key, why)
        self._replays[key] = run if why else graph.replay
        return output

    def replay(self, key: int, metadata: AttentionMetadata) -> None:
        """The lengths lie where the recorded attention reads them: `plan` has put them there."""
        self._replays[key]()
