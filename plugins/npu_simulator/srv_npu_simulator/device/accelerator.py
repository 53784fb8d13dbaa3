"""The card as PyTorch sees it: the module `torch.npu`, and its registration.

`install()` claims PyTorch's PrivateUse1 backend for the whole process under the name "npu". It cannot be undone, and a
process can have only one such backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from srv.testing import simulated_device
from srv.testing.simulated_device import Refusals
from srv_npu_simulator.device.graph import NPUGraph
from srv_npu_simulator.device.mstx import Mstx
from srv_npu_simulator.device.stream import Event, Stream
from srv_npu_simulator.socs import Soc

NAME = "npu"
MESSAGES = {
    "mixed": (
        "{operator}: expected all tensors to be on the same device, but was given {places}. "
        "Move them to one first; only 0-dim host tensors that are no index, and copies, may mix."
    ),
    "exhausted": (
        "NPU out of memory. Tried to allocate {nbytes} bytes on {device} (simulated), "
        "but {free} of {capacity} are free. Use less of it: a smaller batch, or a smaller KV pool."
    ),
    "capturing": "while a stream is being captured into an NPUGraph",
}


class Accelerator(simulated_device.SimulatedAccelerator):
    """`torch.npu`, also known as `torch_npu.npu`: one simulated card, with torch_npu's names."""

    stream_class = Stream
    reads_host_late = True  # torch_npu enqueues the copy with only the address

    def __init__(self, soc: Soc, capacity: int, asynchronous: bool = False, devices: int = 1) -> None:
        super().__init__(
            NAME,
            capacity,
            device_name=soc.device_name,
            refusals=Refusals(f"{NAME}:0", **MESSAGES),
            asynchronous=asynchronous,
            devices=devices,
        )
        self.soc = soc
        self.asynchronous = asynchronous  # as it was loaded; tests change `deferral.enabled`
        self.config = SimpleNamespace(allow_internal_format=False)
        self._jit_compile = True
        self.mstx = Mstx()
        self.Event = partial(Event, self.current_stream)
        self.NPUGraph = partial(NPUGraph, self.recorder, self.memory, self.current_stream, self.deferral.enqueue)

    # Device

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        """name, total_memory and L2_cache_size (bytes), cube_core_num, vector_core_num, uuid."""
        return SimpleNamespace(
            name=self.soc.device_name,
            total_memory=self.memory.capacity,
            cube_core_num=self.soc.cube_cores,
            vector_core_num=self.soc.vector_cores,
            L2_cache_size=self.soc.l2_cache,
            uuid=f"simulated-{self.soc.key}-0",
        )

    def get_device_capability(self, device: object = None) -> None:
        """None, as on the real card: NPUs have no such number."""

    def get_soc_version(self) -> int:
        return self.soc.soc_id

    def get_cann_version(self, module: str = "CANN") -> str:
        return "simulated"

    def set_compile_mode(self, jit_compile: bool = False) -> None:
        """It only changes `is_jit_compile_false`: nothing is compiled here."""
        self._jit_compile = jit_compile

    def is_jit_compile_false(self) -> bool:
        """Whether the program has disabled JIT compilation, which some cards enable by default."""
        return not self._jit_compile

    # Memory

    def memory_reserved(self, device: object = None) -> int:
        return self.memory.allocated

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.memory.allocated,
            "allocated_bytes.all.peak": self.memory.peak,
            "reserved_bytes.all.current": self.memory.allocated,
        }

    # Graphs

    @contextmanager
    def graph(
        self,
        npu_graph: NPUGraph,
        pool: object = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """Capture this thread's operators into `npu_graph`."""
        self.synchronize()
        with self.stream(stream if stream is not None else Stream()):
            npu_graph.capture_begin(pool, capture_error_mode, auto_dispatch_capture)
            try:
                yield
            except BaseException:
                npu_graph.abandon()
                raise
            npu_graph.capture_end()

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 0)

    def is_current_stream_capturing(self) -> bool:
        return self.recorder.active is not None


def install(soc: Soc, capacity: int, asynchronous: bool = False, devices: int = 1) -> Accelerator:
    """Register the card, one of `devices` that are alike, once per process, and return `torch.npu`.

    RuntimeError if another backend has claimed PrivateUse1, or another card was simulated here before.
    """
    title = "the NPU simulator"
    present = simulated_device.install(
        NAME, Accelerator, lambda: Accelerator(soc, capacity, asynchronous, devices), title
    )
    loaded = _described(present.soc, present.memory.capacity, present.asynchronous, present.device_count())
    asked = _described(soc, capacity, asynchronous, devices)
    if loaded != asked:
        raise RuntimeError(
            f"{title} was loaded as {loaded} here, and cannot become {asked}: one process simulates one card"
        )
    return present


def _described(soc: Soc, capacity: int, asynchronous: bool, devices: int) -> str:
    alike = "" if devices == 1 else f"one of {devices} times "
    return f"{alike}{soc.key!r} with {capacity} bytes{', asynchronous' if asynchronous else ''}"
