"""The accelerator as PyTorch sees it: the module `torch.<name>`, and its registration.

`install` claims PyTorch's PrivateUse1 backend for the whole process. It cannot be undone, and a process can have only
one such backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend, rename_privateuse1_backend

from srv.testing.simulated_device.copies import Transfers
from srv.testing.simulated_device.deferral import Deferral
from srv.testing.simulated_device.graphs import WAITING, Recorder
from srv.testing.simulated_device.kernels import (
    ALSO_DIRECT,
    SUBSTITUTES,
    VIEWS,
    Kernel,
    host_kernel_names,
    view_kernel,
)
from srv.testing.simulated_device.memory import DeviceMemory, fill, pinned
from srv.testing.simulated_device.refusals import Refusals
from srv.testing.simulated_device.stream import Event, Stream
from srv.testing.simulated_device.tensors import HOST_KEY, TensorFactory

# PyTorch's name of the PrivateUse1 backend until it is claimed.
_UNCLAIMED = "privateuseone"


class SimulatedAccelerator:
    """`torch.<name>`: a simulated device, with the usual functions of a torch backend.

    devices: how many the host is said to have. A process has the memory and the streams of one of them: that which it
    selects before it allocates anything, or else the first.

    It has no API for graphs, because each backend has its own; they can all use `recorder` and `graphs.Graph`.
    capacity: bytes. operators: custom operators in torch.ops.<name>, as schema -> host function; one with an attribute
    `meta`, a function, has the shapes of its results from there. asynchronous: operators run when the host waits
    (`deferral`). `install` creates it after PyTorch knows `name` as a device.
    """

    stream_class: type[Stream] = Stream
    # Whether a non_blocking copy to the device reads host memory only when the stream executes it.
    reads_host_late = False

    def __init__(
        self,
        name: str,
        capacity: int,
        *,
        device_name: str = "",
        refusals: Refusals | None = None,
        operators: Mapping[str, Callable[..., Any]] | None = None,
        asynchronous: bool = False,
        devices: int = 1,
    ) -> None:
        self.name = name
        self._devices = devices
        self._device = torch.device(name, 0)
        self.Stream: Callable[..., Stream] = self.stream_class
        self.Event: Callable[..., Event] = Event
        self._device_name = device_name or f"{name} (simulated)"
        self._refusals = refusals if refusals is not None else Refusals(str(self._device))
        self._operators = dict(operators or {})
        self.memory = DeviceMemory(capacity, self._refusals)
        self.recorder = Recorder(self._refusals)
        self.factory = TensorFactory(self._device, self.memory, self.recorder)
        # torch.Generator(device=name) would need C++; this one holds the state of the device's random numbers.
        self.generator = torch.Generator()
        self._default_stream = self.stream_class()
        self._thread = threading.local()
        self.deferral = Deferral(asynchronous, self.factory, self.current_stream)
        self.memory.freed = self._overwrite
        self.transfers = Transfers(
            self._device,
            self.memory,
            self.factory,
            self.recorder,
            self.current_stream,
            self.reads_host_late,
            self.deferral,
        )
        self._libraries: list[torch.library.Library] = []

    def _overwrite(self, freed: torch.UntypedStorage) -> None:
        """In the asynchronous mode, memory is used again in the order of the default stream, whatever others do."""
        if self.deferral.enabled and freed.nbytes():
            self._default_stream.enqueue(lambda: fill(freed, 0xFF))

    # Device

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self._devices

    def current_device(self) -> int:
        return self._device.index

    def set_device(self, device: int | str | torch.device) -> None:
        """Select the device of this process. RuntimeError for one that does not exist, or a second one."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index == self._device.index:
            return
        ordinal = f"{self.name}:{index} was asked for"
        if not 0 <= index < self._devices:
            there = f"there is one device, {self._device}" if self._devices == 1 else f"there are {self._devices}"
            raise RuntimeError(f"invalid device ordinal: {ordinal}, but {there}")
        if self.memory.peak:
            raise RuntimeError(f"{ordinal}, but this process has used {self._device}: it simulates one device")
        self._device = self.factory.device = self.transfers.device = torch.device(self.name, index)
        self._refusals.device = str(self._device)

    def get_device_name(self, device: object = None) -> str:
        return self._device_name

    # Memory

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """(free, total) bytes."""
        return self.memory.free, self.memory.capacity

    def memory_allocated(self, device: object = None) -> int:
        return self.memory.allocated

    def max_memory_allocated(self, device: object = None) -> int:
        return self.memory.peak

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.memory.reset_peak()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New page-locked host memory; `torch.empty(..., pin_memory=True)` would need C++."""
        return pinned(shape, dtype)

    @property
    def pageable_copies(self) -> int:
        """The number of copies between the device and host memory that is not page-locked, so far."""
        return self.transfers.pageable

    def empty_cache(self) -> None:
        """Do nothing: freed memory is not cached."""

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
        """Make `stream` the current stream of this thread."""
        self._thread.stream = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[Stream]:
        """Make `stream` the current stream of this thread within the context."""
        previous = self.current_stream()
        self.set_stream(stream)
        try:
            yield stream
        finally:
            self.set_stream(previous)

    def synchronize(self, device: object = None) -> None:
        """Wait for the default and the current stream."""
        self.recorder.refuse(*WAITING)
        self._default_stream.synchronize()
        self.current_stream().synchronize()

    # Registration

    def register(self) -> None:
        """Register the device's kernels with PyTorch's dispatcher."""
        kernels: dict[str, Callable[..., Any]] = {
            name: self._kernel(name) for name in (*host_kernel_names(), *ALSO_DIRECT)
        }
        kernels |= self.transfers.kernels()
        kernels |= {name: self._kernel(host_name) for name, host_name in SUBSTITUTES.items()}
        kernels |= {name: view_kernel(name) for name in VIEWS}
        aten = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, kernel in kernels.items():
            aten.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
        self.keep_alive(aten)
        if self._operators:
            self._define(self._operators)

    def _define(self, operators: Mapping[str, Callable[..., Any]]) -> None:
        library = torch.library.Library(self.name, "DEF")  # type: ignore[no-untyped-call]
        for schema, function in operators.items():
            name = schema.partition("(")[0]
            library.define(schema)  # type: ignore[no-untyped-call]
            library.impl(name, function, HOST_KEY)  # type: ignore[no-untyped-call]
            library.impl(name, self._kernel(f"{self.name}::{name}"), "PrivateUse1")  # type: ignore[no-untyped-call]
            if hasattr(function, "meta"):
                library.impl(name, function.meta, "Meta")  # type: ignore[no-untyped-call]
        self.keep_alive(library)

    def keep_alive(self, library: torch.library.Library) -> None:
        """Keep a reference: a library's registrations end when it is garbage-collected."""
        self._libraries.append(library)

    def _kernel(self, name: str) -> Kernel:
        return Kernel(name, self.factory, self.generator, self.recorder, self._refusals, self.deferral)


Accelerator = TypeVar("Accelerator", bound=SimulatedAccelerator)


def install(name: str, kind: type[Accelerator], make: Callable[[], Accelerator], title: str = "") -> Accelerator:
    """Register the result of `make` as `torch.<name>`, once per process, and return it; later calls return the same.

    Raises RuntimeError, with `title` as the device's name, if another backend has claimed PrivateUse1, or if
    `torch.<name>` exists and is no `kind`.
    """
    title = title or f"{name} (simulated)"
    claimed = torch._C._get_privateuse1_backend_name()
    if claimed not in (_UNCLAIMED, name):
        raise RuntimeError(
            f"{title} cannot be loaded: PyTorch's one PrivateUse1 backend is {claimed!r} in this process "
            "already, and that cannot be undone. Load it in a process of its own."
        )
    present = getattr(torch, name, None)
    if isinstance(present, kind):
        return present
    if present is not None:
        raise RuntimeError(
            f"{title} cannot be loaded: torch.{name} is there already, from another backend. Load it in a "
            "process of its own."
        )
    # This comes first, so that torch.device knows the name.
    rename_privateuse1_backend(name)
    accelerator = make()
    _setup_privateuseone_for_python_backend(name, backend_module=accelerator)
    accelerator.register()
    return accelerator
