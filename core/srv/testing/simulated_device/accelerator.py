"""The accelerator as PyTorch sees it: what `torch.<name>` is, and the one step that registers it.

`install` claims PyTorch's PrivateUse1 backend for the whole process: it cannot be undone, and no second backend can
do the same there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend, rename_privateuse1_backend

from srv.testing.simulated_device.copies import Transfers
from srv.testing.simulated_device.graphs import WAITING, Recorder
from srv.testing.simulated_device.kernels import (
    ALSO_DIRECT,
    STAND_INS,
    VIEWS,
    Kernel,
    host_kernel_names,
    view_kernel,
)
from srv.testing.simulated_device.memory import DeviceMemory
from srv.testing.simulated_device.refusals import Refusals
from srv.testing.simulated_device.stream import Event, Stream
from srv.testing.simulated_device.tensors import HOST_KEY, TensorFactory

# What PyTorch calls its backend for outside devices until somebody claims it.
_UNCLAIMED = "privateuseone"


class SimulatedAccelerator:
    """`torch.<name>`: one simulated device, with the functions that torch's own backends have taught people to expect.

    It says nothing of graphs, which every backend offers in its own way; `recorder` and `graphs.Graph` serve them all.
    capacity: bytes. operators: the device's own beside PyTorch's, as torch.ops.<name>: schema to function of the host.
    Made once `name` is a device that PyTorch knows, which `install` sees to.
    """

    stream_class: type[Stream] = Stream
    # Whether a copy to the device with non_blocking reads host memory only when the device gets there.
    reads_host_late = False

    def __init__(
        self,
        name: str,
        capacity: int,
        *,
        device_name: str = "",
        refusals: Refusals | None = None,
        operators: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.name = name
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
            raise RuntimeError(
                f"invalid device ordinal: {self.name}:{index} was asked for, but there is one device, {self._device}"
            )

    def get_device_name(self, device: object = None) -> str:
        return self._device_name

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

    def set_stream(self, stream: Stream) -> None:
        """Make `stream` this thread's current one."""
        self._thread.stream = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[Stream]:
        """Make `stream` this thread's current one, for a while."""
        previous = self.current_stream()
        self.set_stream(stream)
        try:
            yield stream
        finally:
            self.set_stream(previous)

    def synchronize(self, device: object = None) -> None:
        """Wait for the work of the default and of the current stream."""
        self.recorder.refuse(*WAITING)
        self._default_stream.synchronize()
        self.current_stream().synchronize()

    # Registration

    def register(self) -> None:
        """Bring the device's kernels to PyTorch's dispatcher."""
        kernels: dict[str, Callable[..., Any]] = {
            name: self._kernel(name) for name in (*host_kernel_names(), *ALSO_DIRECT)
        }
        kernels |= Transfers(
            self._device, self.memory, self.factory, self.recorder, self.current_stream, self.reads_host_late
        ).kernels()
        kernels |= {name: self._kernel(host_name) for name, host_name in STAND_INS.items()}
        kernels |= {name: view_kernel(name) for name in VIEWS}
        aten = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, kernel in kernels.items():
            aten.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
        self.keep(aten)
        if self._operators:
            self._define(self._operators)

    def _define(self, operators: Mapping[str, Callable[..., Any]]) -> None:
        own = torch.library.Library(self.name, "DEF")  # type: ignore[no-untyped-call]
        for schema, function in operators.items():
            name = schema.partition("(")[0]
            own.define(schema)  # type: ignore[no-untyped-call]
            own.impl(name, function, HOST_KEY)  # type: ignore[no-untyped-call]
            own.impl(name, self._kernel(f"{self.name}::{name}"), "PrivateUse1")  # type: ignore[no-untyped-call]
        self.keep(own)

    def keep(self, library: torch.library.Library) -> None:
        """A library's registrations end when it is collected."""
        self._libraries.append(library)

    def _kernel(self, name: str) -> Kernel:
        return Kernel(name, self.factory, self.generator, self.recorder, self._refusals)


Accelerator = TypeVar("Accelerator", bound=SimulatedAccelerator)


def install(name: str, kind: type[Accelerator], make: Callable[[], Accelerator], title: str = "") -> Accelerator:
    """Register what `make` gives as `torch.<name>` in this process, once, and return it; later calls give the same.

    RuntimeError, which calls the device `title`, if another backend has claimed PrivateUse1, or what `torch.<name>` is
    now is no `kind`.
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
    # First, so that the name is a device that torch.device knows.
    rename_privateuse1_backend(name)
    accelerator = make()
    _setup_privateuseone_for_python_backend(name, backend_module=accelerator)
    accelerator.register()
    return accelerator
