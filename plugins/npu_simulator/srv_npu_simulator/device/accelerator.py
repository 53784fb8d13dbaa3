"""The card as PyTorch sees it: what `torch.npu` is, and the one step that registers it.

`install()` claims PyTorch's PrivateUse1 backend for the whole process under the name "npu": it cannot be undone,
and no second backend can do the same there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend, rename_privateuse1_backend

from srv_npu_simulator.device.copies import Transfers
from srv_npu_simulator.device.graph import NPUGraph, Recorder
from srv_npu_simulator.device.kernels import ALSO_DIRECT, STAND_INS, VIEWS, Kernel, host_kernel_names, view_kernel
from srv_npu_simulator.device.memory import DeviceMemory
from srv_npu_simulator.device.stream import Event, Stream
from srv_npu_simulator.device.tensors import TensorFactory
from srv_npu_simulator.socs import Soc

NAME = "npu"


class Accelerator:
    """`torch.npu`, also known as `torch_npu.npu`: one simulated card."""

    def __init__(self, soc: Soc, capacity: int) -> None:
        self.soc = soc
        self.memory = DeviceMemory(capacity)
        self.factory = TensorFactory(self.memory)
        self.recorder = Recorder()
        self.config = SimpleNamespace(allow_internal_format=False)
        # torch.Generator(device="npu") would need C++; this one holds the state of the device's random numbers.
        self.generator = torch.Generator()
        self.Stream = Stream
        self.Event = partial(Event, self.current_stream)
        self.NPUGraph = partial(NPUGraph, self.recorder)
        self._default_stream = Stream()
        self._thread = threading.local()
        self._libraries: list[torch.library.Library] = []

    # Device

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: int | str | torch.device) -> None:
        """Accept the one card there is; RuntimeError for another."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index != 0:
            raise RuntimeError(f"invalid device ordinal: npu:{index} was asked for, but there is one device, npu:0")

    def get_device_name(self, device: object = None) -> str:
        return self.soc.device_name

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
        """Accepted without effect: nothing is compiled here."""

    # Memory

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """(free, total) bytes."""
        return self.memory.free, self.memory.capacity

    def memory_allocated(self, device: object = None) -> int:
        return self.memory.taken

    def memory_reserved(self, device: object = None) -> int:
        return self.memory.taken

    def max_memory_allocated(self, device: object = None) -> int:
        return self.memory.peak

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.memory.reset_peak()

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.memory.taken,
            "allocated_bytes.all.peak": self.memory.peak,
            "reserved_bytes.all.current": self.memory.taken,
        }

    def empty_cache(self) -> None:
        """Nothing is cached: freed memory is free at once."""

    # Random numbers

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator. `torch.manual_seed` calls it as well."""
        self.generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        self.generator.set_state(state)

    # Streams

    def default_stream(self, device: object = None) -> Stream:
        return self._default_stream

    def current_stream(self, device: object = None) -> Stream:
        return cast(Stream, getattr(self._thread, "stream", self._default_stream))

    def set_stream(self, stream: Stream) -> None:
        self._thread.stream = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[Stream]:
        """Make `stream` this thread's current one."""
        previous = self.current_stream()
        self._thread.stream = stream
        try:
            yield stream
        finally:
            self._thread.stream = previous

    def synchronize(self, device: object = None) -> None:
        """Wait for the work of the default and of the current stream."""
        self.recorder.forbid("synchronize", "wait after the replay")
        self._default_stream.synchronize()
        self.current_stream().synchronize()

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
        with self.stream(stream if stream is not None else self.Stream()):
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

    # Registration

    def register(self) -> None:
        """Bring the device's kernels to PyTorch's dispatcher."""
        make = self._kernel
        kernels = {name: make(name) for name in (*host_kernel_names(), *ALSO_DIRECT)}
        special = Transfers(self.factory, self.current_stream, self.recorder).kernels()
        special |= {name: make(host_name) for name, host_name in STAND_INS.items()}
        special |= {name: view_kernel(name) for name in VIEWS}
        aten = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, kernel in (kernels | special).items():
            aten.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
        self.keep(aten)

    def keep(self, library: torch.library.Library) -> None:
        """A library's registrations end when it is collected."""
        self._libraries.append(library)

    def _kernel(self, name: str) -> Kernel:
        return Kernel(name, self.factory, self.generator, self.recorder)


def install(soc: Soc, capacity: int) -> Accelerator:
    """Register the card in this process, once, and return `torch.npu`.

    RuntimeError if another backend has claimed PrivateUse1, or another card was simulated here before.
    """
    claimed = torch._C._get_privateuse1_backend_name()
    if claimed not in ("privateuseone", NAME):
        raise RuntimeError(
            f"the NPU simulator cannot be loaded: PyTorch's one PrivateUse1 backend is {claimed!r} in this process "
            "already, and that cannot be undone. Load the simulator in a process of its own."
        )
    present = getattr(torch, NAME, None)
    if present is not None:
        return _same(present, soc, capacity)
    # First, so that "npu" is a device that torch.device knows.
    rename_privateuse1_backend(NAME)
    accelerator = Accelerator(soc, capacity)
    _setup_privateuseone_for_python_backend(NAME, backend_module=accelerator)
    accelerator.register()
    return accelerator


def _same(present: object, soc: Soc, capacity: int) -> Accelerator:
    if not isinstance(present, Accelerator):
        raise RuntimeError(
            "the NPU simulator cannot be loaded: torch.npu is there already, from another backend. Load the simulator "
            "in a process of its own."
        )
    if present.soc != soc or present.memory.capacity != capacity:
        raise RuntimeError(
            f"the NPU simulator was loaded as {present.soc.key!r} with {present.memory.capacity} bytes here, and "
            f"cannot become {soc.key!r} with {capacity}: one process simulates one card"
        )
    return present
