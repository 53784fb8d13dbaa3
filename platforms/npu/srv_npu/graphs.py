"""Captured steps through ACL graphs (torch.npu.graph).

The fused attention takes sequence lengths as host integers, and a capture records them with the call. Captured with
`auto_dispatch_capture`, a graph knows which of its calls took such values, and `update` gives them new ones; a
replay without it would attend over the lengths of the capture. Which lengths those are comes with the step's
attention metadata (`srv_npu.attention.Step`); this module knows nothing else of attention.

    replay n      captured calls wait for their new lengths, take them, and ask for the next ones
    update n + 1  must not arrive before that: it would change calls that still run, and a call that takes the news of
                  two updates for one waits forever at the next replay. So the host waits for the graph's last replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from srv.errors import InternalError
from srv_npu.sdk import Sdk

_WARM_UPS = 2  # the first call loads kernels, the second settles what is allocated


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph of torch_npu, and an event behind its last replay (complete while there was none)."""

    graph: Any
    replayed: Any


class NpuGraphs:
    """Implements `srv.platform.interface.Graphs`. All graphs of a worker share one pool of memory."""

    def __init__(self, sdk: Callable[[], Sdk]) -> None:
        self._sdk = sdk
        self._graphs: dict[int, _Captured] = {}
        self._pool: Any = None

    def capture(self, key: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See `srv.platform.interface.Graphs`."""
        npu = self._sdk().npu
        for _ in range(_WARM_UPS):
            run()
        npu.synchronize()
        if self._pool is None:
            self._pool = npu.graph_pool_handle()
        graph = npu.NPUGraph()
        with npu.graph(graph, pool=self._pool, auto_dispatch_capture=True):
            output = run()
        self._graphs[key] = _Captured(graph, npu.Event())
        return output

    def replay(self, key: int, metadata: Any) -> None:
        """See `srv.platform.interface.Graphs`. InternalError if nothing was captured under this key."""
        captured = self._graphs.get(key)
        if captured is None:
            raise InternalError(f"a step of {key} rows is to be replayed, but none was captured")
        captured.replayed.synchronize()
        captured.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": metadata.kv_lens}])
        captured.graph.replay()
        captured.replayed.record()
