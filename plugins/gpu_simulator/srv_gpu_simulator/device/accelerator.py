"""The GPU as PyTorch sees it: the module `torch.gpusim`, and its registration.

`install()` claims PyTorch's PrivateUse1 backend for the whole process under the name "gpusim"; PyTorch refuses to
rename it to "cuda" or "xpu". It cannot be undone, and a process can have only one such backend. The module has the
functions of `torch.cuda` for NVIDIA and AMD GPUs, and those of `torch.xpu` for Intel's: a function that one of them
lacks is missing here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from srv.testing.simulated_device import stream as streams
from srv.testing.simulated_device.vendor import VendorAccelerator, install_card
from srv_gpu_simulator.cards import Card
from srv_gpu_simulator.device.graph import CUDAGraph, Handle, Pools, Recording, XPUGraph
from srv_gpu_simulator.device.launch import Launcher
from srv_gpu_simulator.device.properties import cuda_properties, xpu_properties
from srv_gpu_simulator.device.ranges import Ranges
from srv_gpu_simulator.device.stream import Event, Stream

NAME = "gpusim"


class Accelerator(VendorAccelerator):
    """What `torch.cuda` and `torch.xpu` have in common.

    launches: calls so far, by name: Triton operators by their own ("silu_and_mul"), the stand-ins' as
    "flashinfer.append_paged_kv_cache". Replays of a graph do not count.
    """

    noun = "GPU"
    stream_type, event_type = Stream, Event

    def __init__(self, card: Card, capacity: int, asynchronous: bool, devices: int) -> None:
        self._streams: list[Stream] = []
        super().__init__(NAME, card, capacity, asynchronous, devices)
        self.card = card
        self.asynchronous = asynchronous  # as it was loaded; tests change `deferral.enabled`
        self.launches: Counter[str] = Counter()
        self.launch = Launcher(self)
        self.pools = Pools()
        self.ranges = Ranges()
        self.first_stream = self._default_stream

    # Device

    def current_device(self) -> int:
        """That of this thread, 0 at first. The process has one device, but a thread may not have selected it yet."""
        return cast(int, getattr(self._thread, "device", 0))

    def set_device(self, device: int | str | torch.device) -> None:
        """Select the device of this thread, which is that of this process from then on."""
        super().set_device(device)
        self._thread.device = self._device.index

    def set_stream(self, stream: streams.Stream) -> None:
        """Make `stream` the current stream of this thread, and its device the current one."""
        super().set_stream(stream)
        self._thread.device = self._device.index

    def check_current_device(self, name: str) -> None:
        """Raise RuntimeError unless this thread has selected the device: Triton launches on the current one."""
        if self.current_device() != self._device.index:
            raise RuntimeError(
                f"{name}: the tensors are on {self._device}, but the current device of this thread is "
                f"{self.name}:{self.current_device()}, on which Triton would launch the kernel; select the device first"
            )

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Select a device within the context; a process has only one."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self._thread.device = before

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    # Memory

    def max_memory_reserved(self, device: object = None) -> int:
        return self.memory.peak

    # Streams

    def keep_stream(self, stream: Stream) -> None:
        """Keep a stream: as on a GPU, its work is done even if the program has dropped it."""
        self._streams.append(stream)

    def drain(self) -> None:
        """Run what is enqueued in any stream."""
        for stream in tuple(self._streams):
            stream.drain()

    def synchronize(self, device: object = None) -> None:
        """Wait for all streams."""
        self.recorder.refuse("synchronize", "wait after the replay")
        self.drain()

    @contextmanager
    def stream(self, stream: streams.Stream | None) -> Iterator[streams.Stream | None]:
        """Make `stream` the current stream of this thread within the context; None changes nothing."""
        if stream is None:
            yield None
            return
        device = self.current_device()
        with super().stream(stream):
            yield stream
        self._thread.device = device

    # Graphs

    @property
    def capture(self) -> Recording | None:
        """The capture of this thread, if any."""
        return cast("Recording | None", self.recorder.active)

    def graph_pool_handle(self) -> Handle:
        """A handle of a new memory pool, which several graphs can share."""
        return self.pools.new_handle()

    def is_current_stream_capturing(self) -> bool:
        capture = self.capture
        return capture is not None and capture.has(self.current_stream())


class CudaAccelerator(Accelerator):
    """`torch.cuda`, of NVIDIA and AMD GPUs."""

    def __init__(self, card: Card, capacity: int, asynchronous: bool, devices: int) -> None:
        super().__init__(card, capacity, asynchronous, devices)
        self.CUDAGraph = partial(CUDAGraph, self)
        self.nvtx = self.ranges

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        """name, total_memory (bytes), multi_processor_count, major, minor, warp_size, gcnArchName, and others."""
        return cuda_properties(self.card, self.memory.capacity)

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return self.card.capability

    def graph(
        self,
        cuda_graph: CUDAGraph,
        pool: Handle | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Any:
        """A context that captures this thread's operators into `cuda_graph`, in `stream` or a stream of its own."""
        return self.capturing_into(cuda_graph, stream, pool, capture_error_mode)


class XpuAccelerator(Accelerator):
    """`torch.xpu`, of Intel GPUs: as of torch 2.13 without `default_stream`, with `XPUGraph`."""

    def __init__(self, card: Card, capacity: int, asynchronous: bool, devices: int) -> None:
        super().__init__(card, capacity, asynchronous, devices)
        self.XPUGraph = partial(XPUGraph, self)
        self.itt = self.ranges  # torch has it in torch.profiler

    @property
    def default_stream(self) -> Any:
        raise AttributeError("torch.xpu has no default_stream; remember current_stream() instead")

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        """name, total_memory (bytes), gpu_subslice_count (Xe cores), sub_group_sizes, has_fp64, and others."""
        return xpu_properties(self.card, self.memory.capacity)

    def get_device_capability(self, device: object = None) -> dict[str, Any]:
        """The properties as a mapping; there is no pair of numbers."""
        return {name: value for name, value in vars(self.get_device_properties()).items() if name != "uuid"}

    def graph(self, xpu_graph: XPUGraph, pool: Handle | None = None, stream: Stream | None = None) -> Any:
        """A context that captures this thread's operators into `xpu_graph`, in `stream` or a stream of its own."""
        return self.capturing_into(xpu_graph, stream, pool)


def install(card: Card, capacity: int, asynchronous: bool = False, devices: int = 1) -> Accelerator:
    """Register the GPU, one of `devices` that are alike, once per process, and return `torch.gpusim`.

    RuntimeError if another backend has claimed PrivateUse1, or another GPU was simulated here before.
    """
    kind = XpuAccelerator if card.vendor == "intel" else CudaAccelerator

    def make(*described: Any) -> Accelerator:
        products = _float32_products_on_host()
        accelerator = kind(*described)
        accelerator.keep_alive(products)
        return accelerator

    return install_card(NAME, Accelerator, make, card, capacity, asynchronous, devices)


def _float32_products_on_host() -> torch.library.Library:
    """Define `mm` with `out_dtype`, which GPUs have, for the host too: the device runs the host's operators."""

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return torch.mm(a.to(out_dtype), b.to(out_dtype))

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("mm.dtype", product, "CPU")  # type: ignore[no-untyped-call]
    return library
