"""The accelerator as PyTorch sees it: what `torch.toy` is, and the one step that registers it.

`install()` claims PyTorch's PrivateUse1 backend for the whole process: it cannot be undone, and no second
plugin can do the same there. It is called by the platform's `create`, in a worker process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from srv_toy_device.device.copies import Transfers
from srv_toy_device.device.fused import FUNCTIONS, SCHEMAS
from srv_toy_device.device.graphs import Graph, GraphMemory, Recorder
from srv_toy_device.device.kernels import ALSO_DIRECT, STAND_INS, VIEWS, Kernel, host_kernel_names, view_kernel
from srv_toy_device.device.memory import DeviceMemory
from srv_toy_device.device.stream import Event, Stream
from srv_toy_device.device.tensors import TensorFactory
from srv_toy_device.settings import device_memory

NAME = "toy"


class Accelerator:
    """`torch.toy`: one simulated device, with the functions that `torch.cuda` has taught people to expect."""

    def __init__(self, capacity: int) -> None:
        self.Stream = Stream
        self.Event = Event
        self.Graph = Graph
        self.memory = DeviceMemory(capacity)
        self._recorder = Recorder(self.memory)
        # torch.Generator(device="toy") would need C++; this one holds the state of the device's random numbers.
        self.generator = torch.Generator()
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
        """Accept the one device there is; RuntimeError for another."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index != 0:
            raise RuntimeError(f"invalid device ordinal: toy:{index} was asked for, but there is one device, toy:0")

    def get_device_name(self, device: object = None) -> str:
        return "toy accelerator (simulated)"

    # Memory

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """(free, total) bytes."""
        return self.memory.free, self.memory.capacity

    def memory_allocated(self, device: object = None) -> int:
        return self.memory.taken

    def max_memory_allocated(self, device: object = None) -> int:
        return self.memory.peak

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
        self._default_stream.synchronize()
        self.current_stream().synchronize()

    # Graphs

    def graph(self, graph: Graph, memory: GraphMemory | None = None) -> AbstractContextManager[Graph]:
        """Record what this thread does into `graph`, which may share `memory` with graphs replayed at other times."""
        return self._recorder.recording(graph, memory)

    def graph_memory(self) -> GraphMemory:
        """Memory that several graphs may share."""
        return GraphMemory(self.memory)

    # Registration

    def register(self) -> None:
        """Bring the device's kernels to PyTorch's dispatcher."""
        factory = TensorFactory(self.memory, self._recorder)

        def kernel(name: str) -> Kernel:
            return Kernel(name, factory, self.generator, self._recorder)

        kernels = {name: kernel(name) for name in (*host_kernel_names(), *ALSO_DIRECT)}
        special = Transfers(self.memory, factory, self._recorder, self.current_stream).kernels()
        special |= {name: kernel(host_name) for name, host_name in STAND_INS.items()}
        special |= {name: view_kernel(name) for name in VIEWS}
        aten = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, function in (kernels | special).items():
            aten.impl(name, function, "PrivateUse1")  # type: ignore[no-untyped-call]
        own = torch.library.Library(NAME, "DEF")  # type: ignore[no-untyped-call]
        for schema in SCHEMAS:
            own.define(schema)  # type: ignore[no-untyped-call]
        for name, function in FUNCTIONS.items():
            own.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
            own.impl(name, kernel(f"{NAME}::{name}"), "PrivateUse1")  # type: ignore[no-untyped-call]
        # A library's registrations end when it is collected.
        self._libraries += (aten, own)


def install() -> Accelerator:
    """Register the device in this process, once, and return `torch.toy`.

    Its memory is SRV_TOY_MEMORY at the first call. RuntimeError if another backend has claimed PrivateUse1.
    """
    present = getattr(torch, NAME, None)
    if present is not None:
        return cast(Accelerator, present)
    accelerator = Accelerator(device_memory(os.environ))
    _setup_privateuseone_for_python_backend(NAME, backend_module=accelerator)
    accelerator.register()
    return accelerator
