"""Graphs: operators and kernels captured once and replayed on the same memory.

    capture   operators run once, so that shapes are known; their results are then poisoned, because a real capture
              computes nothing. Operations that are not permitted (waiting for the device, copies from or to the host,
              results whose size depends on data, a stream outside the capture) raise RuntimeError.
    replay    the same operators on the same addresses, in the same order, with the captured host values.

Memory that is allocated during a capture belongs to a pool. A block is reused within its pool when its tensor is freed,
so graphs that share a pool overwrite one another's results, as on a GPU.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from srv.testing.simulated_device.graphs import Call, GraphMemory
from srv.testing.simulated_device.stream import Stream
from srv.testing.simulated_device.vendor import Capture, VendorGraph

if TYPE_CHECKING:
    from srv_gpu_simulator.device.accelerator import Accelerator

Handle = tuple[int, int]
_handles = itertools.count(1)


class Pools:
    """The memory pools of graphs by handle. A pool lives as long as a graph that uses it."""

    def __init__(self) -> None:
        self._pools: weakref.WeakValueDictionary[Handle, Pool] = weakref.WeakValueDictionary()

    def new_handle(self) -> Handle:
        return (0, next(_handles))

    def find(self, handle: Handle, accelerator: Accelerator) -> Pool:
        pool = self._pools.get(handle)
        if pool is None:
            pool = self._pools[handle] = Pool(handle, GraphMemory(accelerator.memory))
        return pool


class Pool:
    """A memory pool of graphs."""

    __slots__ = ("__weakref__", "handle", "memory")

    def __init__(self, handle: Handle, memory: GraphMemory) -> None:
        self.handle = handle
        self.memory = memory


class Recording(Capture):
    """The capture of one graph."""

    def __init__(self, accelerator: Accelerator, kind: str, stream: Stream) -> None:
        super().__init__(kind, accelerator.deferral.enqueue)
        self._accelerator = accelerator
        self._origin = stream
        self._streams = {id(stream)}
        self._unjoined: dict[int, Stream] = {}

    # Streams

    def has(self, stream: Stream) -> bool:
        """Whether work of `stream` is being captured."""
        return id(stream) in self._streams

    def join(self, recorded_in: Stream, waiting: Stream) -> None:
        """`waiting` waits for an event that this capture recorded in `recorded_in`."""
        if not self.has(waiting):
            self._streams.add(id(waiting))
            self._unjoined[id(waiting)] = waiting
        if waiting is not recorded_in:
            self._unjoined.pop(id(recorded_in), None)

    def finish(self) -> None:
        if self._unjoined:
            raise RuntimeError(
                f"{self._kind}.capture_end: {len(self._unjoined)} streams that the capture forked were not joined: the "
                "capturing stream must wait for an event behind their last operator"
            )
        super().finish()

    def add(self, call: Call, inputs: Sequence[Any]) -> None:
        stream = self._accelerator.current_stream()
        if not self.has(stream):
            raise RuntimeError(
                f"{call.name}: not permitted in this stream while another one is being captured; let it wait for an "
                "event of the capture first"
            )
        if stream is not self._origin:
            self._unjoined[id(stream)] = stream
        super().add(call, inputs)


class CUDAGraph(VendorGraph):
    """`torch.cuda.CUDAGraph`, and `torch.xpu.XPUGraph` under its name. Capture through `torch.gpusim.graph(...)`."""

    kind = "CUDAGraph"

    def __init__(self, accelerator: Accelerator, keep_graph: bool = False) -> None:
        super().__init__(accelerator)
        self._pool: Pool | None = None

    def capture_begin(self, pool: Handle | None = None, capture_error_mode: str = "global") -> None:
        """Capture this thread's operators in the current stream, which must not be the default one.

        pool: from `graph_pool_handle()`, or `pool()` of another graph.
        """
        self.check_free()
        accelerator = self._accelerator
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"{self.kind}.capture_begin: unknown capture_error_mode {capture_error_mode!r}")
        stream = accelerator.current_stream()
        if stream is accelerator.first_stream:
            raise RuntimeError(
                f"{self.kind}.capture_begin: graphs must be captured on a stream that is not the default"
            )
        accelerator.drain()
        self._pool = accelerator.pools.find(pool if pool is not None else accelerator.pools.new_handle(), accelerator)
        self.begin(Recording(accelerator, self.kind, stream), self._pool.memory)

    def reset(self) -> None:
        """Release the capture and its memory."""
        self._capture = self._pool = None

    def pool(self) -> Handle:
        """The handle of this graph's memory pool."""
        if self._pool is None:
            raise RuntimeError(f"{self.kind}.pool: nothing was captured into this graph")
        return self._pool.handle


class XPUGraph(CUDAGraph):
    """`torch.xpu.XPUGraph`."""

    kind = "XPUGraph"
