"""Captured steps through ACL graphs (torch.npu.graph).

The fused attention operator takes sequence lengths as host integers, and a capture records them with the call. With
`auto_dispatch_capture`, a graph knows which of its calls took such values, and `update` changes them; a replay without
an update would use the lengths of the capture. The new lengths are in the step's attention metadata (`kv_lens` of
`srv_npu.attention.AttentionMetadata` and of `srv_npu.latent_attention.LatentMetadata`), the only field that this module
reads.

    replay n      the captured calls wait for their new lengths, run with them, and wait for the next update
    update n + 1  must not come before that: it would change calls that are still running, and a call that sees two
                  updates as one waits forever at the next replay. So the host waits for the graph's last replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from srv.errors import InternalError
from srv_npu.sdk import Sdk

_WARM_UPS = 2  # the first call loads kernels; by the second, all buffers are allocated


@dataclass(frozen=True, slots=True)
class _Captured:
    """A torch_npu graph, and an event recorded after its last replay (complete before the first one)."""

    graph: Any
    replayed: Any


class NpuGraphs:
    """Implements `srv.platform.interface.Graphs`. All graphs of a worker share one memory pool."""

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

    def replay(self, key: int, metadata: Sequence[Any]) -> None:
        """See `srv.platform.interface.Graphs`. InternalError if nothing was captured under this key.

        All cache groups have the same lengths.
        """
        captured = self._graphs.get(key)
        if captured is None:
            raise InternalError(f"cannot replay a step of {key} rows: no graph was captured for that number of rows")
        captured.replayed.synchronize()
        captured.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": metadata[0].kv_lens}])
        captured.graph.replay()
        captured.replayed.record()
