"""The card as PyTorch sees it: the module `torch.npu`, and its registration.

`install()` claims PyTorch's PrivateUse1 backend for the whole process under the name "npu". It cannot be undone, and a
process can have only one such backend.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from srv.testing.simulated_device.stream import Stream
from srv.testing.simulated_device.vendor import VendorAccelerator, install_card
from srv_npu_simulator.device.graph import NPUGraph
from srv_npu_simulator.device.mstx import Mstx
from srv_npu_simulator.socs import Soc

NAME = "npu"


class Accelerator(VendorAccelerator):
    """`torch.npu`, also known as `torch_npu.npu`: one simulated card, with torch_npu's names."""

    noun, capturing = "NPU", "while a stream is being captured into an NPUGraph"
    reads_host_late = True  # torch_npu enqueues the copy with only the address

    def __init__(self, soc: Soc, capacity: int, asynchronous: bool = False, devices: int = 1) -> None:
        super().__init__(NAME, soc, capacity, asynchronous, devices)
        self.soc = soc
        self.config = SimpleNamespace(allow_internal_format=False)
        self._jit_compile = True
        self.mstx = Mstx()
        self.NPUGraph = partial(NPUGraph, self)

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

    # Graphs

    def graph(
        self,
        npu_graph: NPUGraph,
        pool: object = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> Any:
        """A context that captures this thread's operators into `npu_graph`."""
        return self.capturing_into(npu_graph, stream, pool, capture_error_mode, auto_dispatch_capture)

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 0)

    def is_current_stream_capturing(self) -> bool:
        return self.recorder.active is not None


def install(soc: Soc, capacity: int, asynchronous: bool = False, devices: int = 1) -> Accelerator:
    """Register the card, one of `devices` that are alike, once per process, and return `torch.npu`.

    RuntimeError if another backend has claimed PrivateUse1, or another card was simulated here before.
    """
    return install_card(NAME, Accelerator, Accelerator, soc, capacity, asynchronous, devices)
