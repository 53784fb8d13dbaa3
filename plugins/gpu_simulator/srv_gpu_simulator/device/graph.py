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

import torch
from torch import Tensor

from srv.testing.simulated_device.graphs import DATA_DEPENDENT, Call, Graph, GraphMemory, depends_on_data
from srv.testing.simulated_device.memory import Allocation
from srv.testing.simulated_device.placement import operator_name
from srv.testing.simulated_device.stream import Stream, poison
from srv.testing.simulated_device.tensors import block_of, host_view, is_device_tensor

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


class Recording(Graph):
    """The capture of one graph."""

    def __init__(self, accelerator: Accelerator, kind: str, stream: Stream) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._kind = kind
        self._origin = stream
        self._streams = {id(stream)}
        self._unjoined: dict[int, Stream] = {}
        self._created: list[Tensor] = []
        self._inputs: dict[int, tuple[str, weakref.ref[Allocation]]] = {}

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

    def check_joined(self) -> None:
        if self._unjoined:
            raise RuntimeError(
                f"{self._kind}.capture_end: {len(self._unjoined)} streams that the capture forked were not joined: the "
                "capturing stream must wait for an event behind their last operator"
            )

    # Called by the recorder

    def capture_error(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Any
    ) -> tuple[str, str] | None:
        """Random numbers are permitted, and each replay draws new ones."""
        return (operator_name(operator._schema), DATA_DEPENDENT) if depends_on_data(operator, args, kwargs) else None

    def created(self, tensor: Tensor) -> None:
        # The view keeps the host memory, and lets the block be reused when the tensor is freed.
        self._created.append(host_view(tensor))

    def add(self, call: Call, inputs: Sequence[Any]) -> None:
        stream = self._accelerator.current_stream()
        if not self.has(stream):
            raise RuntimeError(
                f"{call.name}: not permitted in this stream while another one is being captured; let it wait for an "
                "event of the capture first"
            )
        if stream is not self._origin:
            self._unjoined[id(stream)] = stream
        for tensor in device_tensors(inputs):
            block = block_of(tensor)
            if isinstance(block, Allocation):  # not of a pool
                self._inputs.setdefault(id(block), (call.name, weakref.ref(block)))
        super().add(call, inputs)

    # After the capture

    def finish(self) -> None:
        """Poison the results: a program must not read them before a replay."""
        for view in self._created:
            poison(view)
        self._created.clear()

    def replay(self) -> None:
        for name, reference in self._inputs.values():
            if reference() is None:
                raise RuntimeError(
                    f"{self._kind}.replay: memory that the captured {name} uses has been freed since the capture; "
                    "keep every input and output of a graph alive for as long as the graph"
                )
        self._accelerator.deferral.enqueue(self.run)


class CUDAGraph:
    """`torch.cuda.CUDAGraph`, and `torch.xpu.XPUGraph` under its name. Capture through `torch.gpusim.graph(...)`."""

    kind = "CUDAGraph"

    def __init__(self, accelerator: Accelerator, keep_graph: bool = False) -> None:
        self._accelerator = accelerator
        self._recording: Recording | None = None
        self._pool: Pool | None = None
        self._ended = False

    def capture_begin(self, pool: Handle | None = None, capture_error_mode: str = "global") -> None:
        """Capture this thread's operators in the current stream, which must not be the default one.

        pool: from `graph_pool_handle()`, or `pool()` of another graph.
        """
        accelerator, recorder = self._accelerator, self._accelerator.recorder
        if self._recording is not None:
            raise RuntimeError(f"{self.kind}.capture_begin: this graph holds a capture; call reset() first")
        if recorder.busy:
            raise RuntimeError(f"{self.kind}.capture_begin: another capture is under way, and captures do not nest")
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"{self.kind}.capture_begin: unknown capture_error_mode {capture_error_mode!r}")
        stream = accelerator.current_stream()
        if stream is accelerator.first_stream:
            raise RuntimeError(
                f"{self.kind}.capture_begin: graphs must be captured on a stream that is not the default"
            )
        accelerator.drain()
        self._pool = accelerator.pools.find(pool if pool is not None else accelerator.pools.new_handle(), accelerator)
        recording = Recording(accelerator, self.kind, stream)
        recorder.begin(recording, self._pool.memory)
        self._recording, self._ended = recording, False

    def capture_end(self) -> None:
        if self._recording is None or self._ended:
            raise RuntimeError(f"{self.kind}.capture_end: nothing is being captured into this graph")
        self._accelerator.recorder.end()
        self._ended = True
        try:
            self._recording.check_joined()
        except RuntimeError:
            self._recording = None
            raise
        self._recording.finish()

    def abandon(self) -> None:
        """End and discard a failed capture."""
        self._accelerator.recorder.end()
        self._recording = None

    def replay(self) -> None:
        """Run the captured operators on the captured memory, in the current stream."""
        self._accelerator.recorder.refuse(f"{self.kind}.replay", "replay after the capture has ended")
        if self._recording is None or not self._ended:
            raise RuntimeError(f"{self.kind}.replay: nothing was captured into this graph; use `graph(...)` first")
        self._recording.replay()

    def reset(self) -> None:
        """Release the capture and its memory."""
        self._recording = self._pool = None

    def pool(self) -> Handle:
        """The handle of this graph's memory pool."""
        if self._pool is None:
            raise RuntimeError(f"{self.kind}.pool: nothing was captured into this graph")
        return self._pool.handle


class XPUGraph(CUDAGraph):
    """`torch.xpu.XPUGraph`."""

    kind = "XPUGraph"


def device_tensors(values: Sequence[Any]) -> list[Tensor]:
    """The device tensors among `values`, also in lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if is_device_tensor(value):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += device_tensors(value)
    return found
