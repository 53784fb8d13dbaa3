"""Captured steps through ACL graphs (torch.npu.graph).

The fused attention operator takes sequence lengths as host integers, and a capture records them with the call. With
`auto_dispatch_capture`, a graph knows which of its calls took such values, and `update` changes them; a replay without
an update would use the lengths of the capture. Calls of layers with a sliding window count their keys from another page
than others, so that each captured call has lengths of its own: backends keep them in `HostLengths` and say with
`NpuGraphs.attends` which a call takes.

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
from srv.platform.interface import GraphKey
from srv_npu.sdk import Sdk

_WARM_UPS = 2  # the first call loads kernels; by the second, all buffers are allocated


@dataclass(slots=True)
class HostLengths:
    """KV lengths per row. Those of a captured call are the same object in every plan, which sets new values."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A torch_npu graph, an event recorded after its last replay (complete before the first one), and the lengths of
    its attention calls, in their order."""

    graph: Any
    replayed: Any
    lengths: tuple[HostLengths, ...]

    def updates(self) -> list[dict[str, list[int]]]:
        """One mapping per call, or one for all if they share their lengths."""
        alike = all(length is self.lengths[0] for length in self.lengths)
        return [{"actual_seq_lengths_kv": length.values} for length in (self.lengths[:1] if alike else self.lengths)]


class NpuGraphs:
    """Implements `srv.platform.interface.Graphs`. All graphs of a worker share one memory pool."""

    def __init__(self, sdk: Callable[[], Sdk]) -> None:
        self._sdk = sdk
        self._graphs: dict[GraphKey, _Captured] = {}
        self._pool: Any = None
        self._recorded: list[HostLengths] | None = None  # of the capture that is under way

    def attends(self, lengths: HostLengths) -> None:
        """An attention call takes these lengths; if it is being captured, replays update it to their values then."""
        if self._recorded is not None:
            self._recorded.append(lengths)

    def capture(self, key: GraphKey, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See `srv.platform.interface.Graphs`."""
        npu = self._sdk().npu
        for _ in range(_WARM_UPS):
            run()
        npu.synchronize()
        if self._pool is None:
            self._pool = npu.graph_pool_handle()
        graph = npu.NPUGraph()
        recorded: list[HostLengths] = []
        self._recorded = recorded
        try:
            with npu.graph(graph, pool=self._pool, auto_dispatch_capture=True):
                output = run()
        finally:
            self._recorded = None
        self._graphs[key] = _Captured(graph, npu.Event(), tuple(recorded))
        return output

    def replay(self, key: GraphKey, metadata: Sequence[Any]) -> None:
        """See `srv.platform.interface.Graphs`. InternalError if nothing was captured under this key."""
        captured = self._graphs.get(key)
        if captured is None:
            raise InternalError(f"cannot replay {key}: no graph was captured for them")
        captured.replayed.synchronize()
        if captured.lengths:
            captured.graph.update(cpu_update_input=captured.updates())
        captured.graph.replay()
        captured.replayed.record()
