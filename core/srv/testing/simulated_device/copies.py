"""Operators that need their own kernels: allocation, copies between host and device, reading scalars."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.deferral import Deferral
from srv.testing.simulated_device.graphs import CROSSING, READING, Call, Recorder
from srv.testing.simulated_device.memory import DeviceMemory, is_pinned
from srv.testing.simulated_device.stream import Stream, enqueue_copy, poison
from srv.testing.simulated_device.tensors import TensorFactory, host_view, is_device_tensor


class Transfers:
    """Kernels that allocate device memory and copy between device and host.

    pageable: copies between the device and host memory that is not pinned, so far.
    """

    def __init__(
        self,
        device: torch.device,
        memory: DeviceMemory,
        factory: TensorFactory,
        recorder: Recorder,
        current_stream: Callable[[], Stream],
        reads_late: bool,
        deferral: Deferral,
    ) -> None:
        self.pageable = 0
        self._deferral = deferral
        self.device = device
        self._memory = memory
        self._factory = factory
        self._recorder = recorder
        self._current_stream = current_stream
        self._reads_late = reads_late

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernels by operator name."""
        return {
            "empty.memory_format": self.empty,
            "empty_strided": self.empty_strided,
            "zero_": self.zero_,
            "_copy_from": self.copy_from,
            "_copy_from_and_resize": self.copy_from_and_resize,
            "_to_copy": self.to_copy,
            "_local_scalar_dense": self.local_scalar_dense,
            "record_stream": self.record_stream,
        }

    def empty(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        self._accept(layout, device, pin_memory)
        dtype = dtype or torch.get_default_dtype()
        return self._factory.empty_like(
            torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
        )

    def empty_strided(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> Tensor:
        self._accept(layout, device, pin_memory)
        dtype = dtype or torch.get_default_dtype()
        return self._factory.empty_like(torch.empty_strided(size, stride, dtype=dtype, device="meta"))

    def zero_(self, tensor: Tensor) -> Tensor:
        view = host_view(tensor)
        self._deferral.enqueue(lambda: self._memory.clear(view))
        self._record("aten::zero_", view.zero_, (), [tensor])
        return tensor

    def copy_from(self, source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
        onto, off = is_device_tensor(destination), is_device_tensor(source)
        if onto and off:
            written, read = host_view(destination), host_view(source)
            self._deferral.enqueue(lambda: written.copy_(read))
            self._record("aten::copy_", written.copy_, (read,), [source, destination])
            return destination
        self._recorder.refuse(*CROSSING)
        if not is_pinned(source if onto else destination):
            self.pageable += 1
        if self._deferral.enabled:
            self._copy_in_order(source, destination, onto, non_blocking)
        elif onto:
            # The copy runs immediately; for a device that reads late, the host memory must still exist later.
            host_view(destination).copy_(source)
            if non_blocking and self._reads_late:
                self._current_stream().enqueue(_check_not_freed(source))
        elif non_blocking:
            enqueue_copy(self._current_stream(), host_view(source), destination)
        else:
            self._current_stream().synchronize()
            destination.copy_(host_view(source))
        return destination

    def _copy_in_order(self, source: Tensor, destination: Tensor, onto: bool, non_blocking: bool) -> None:
        """A copy between host and device in the asynchronous mode. A blocking one waits for the stream."""
        host, stream = source if onto else destination, self._current_stream()
        if non_blocking and not is_pinned(host):
            raise RuntimeError(
                f"a copy with non_blocking=True {'from' if onto else 'to'} host memory that is not pinned "
                f"({host.dtype} of shape {tuple(host.shape)}): the device cannot access it by itself"
            )
        read, written = (source, host_view(destination)) if onto else (host_view(source), destination)
        if non_blocking:
            if not onto:
                poison(written)
            self._deferral.enqueue(lambda: written.copy_(read))
        else:
            stream.synchronize()
            written.copy_(read)

    def copy_from_and_resize(self, source: Tensor, destination: Tensor) -> Tensor:
        return self.copy_from(source, destination.resize_(source.shape))

    def to_copy(
        self,
        source: Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        view = host_view(source) if is_device_tensor(source) else source
        like = torch.empty_like(view, dtype=dtype, device="meta", memory_format=memory_format)
        if device is not None and device.type == "meta":
            return like
        if device is None or device.type == self.device.type:
            self._accept(layout, device, pin_memory)
            return self.copy_from(source, self._factory.empty_like(like), non_blocking)
        self._recorder.refuse(*CROSSING)
        self._accept(layout, None, pin_memory)
        destination = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        return self.copy_from(source, destination, non_blocking)

    def local_scalar_dense(self, source: Tensor) -> bool | int | float | complex:
        self._recorder.refuse(*READING)
        self._current_stream().synchronize()
        return host_view(source).item()

    def record_stream(self, source: Tensor, stream: object) -> None:
        """Do nothing: in the asynchronous mode, a program must keep what another stream uses until an event."""

    def _record(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], inputs: list[Tensor]) -> None:
        graph = self._recorder.active
        if graph is not None:
            graph.add(Call(name, function, args, {}, (None,)), inputs)

    def _accept(self, layout: torch.layout | None, device: torch.device | None, pin_memory: bool | None) -> None:
        name = self.device.type
        if layout not in (None, torch.strided):
            raise NotImplementedError(f"{name} (simulated) has dense tensors only, not {layout}")
        if device is not None and device.index not in (None, self.device.index):
            raise RuntimeError(
                f"invalid device ordinal: {device} was asked for, but this process has one device, {self.device}"
            )
        if pin_memory:
            raise NotImplementedError(f"{name} (simulated) cannot pin host memory; leave pin_memory out")


class _Lifetime:
    """An object that lives as long as the storage that refers to it."""

    __slots__ = ("__weakref__",)


def _check_not_freed(source: Tensor) -> Callable[[], None]:
    """A stream operation that raises RuntimeError if the memory of `source` has been freed."""
    storage = source.untyped_storage()
    lifetime = getattr(storage, "lifetime", None)  # of an earlier copy from the same memory
    if lifetime is None:
        lifetime = storage.lifetime = _Lifetime()  # type: ignore[attr-defined]
    reference, described = weakref.ref(lifetime), f"{source.dtype} of shape {tuple(source.shape)}"

    def check() -> None:
        if reference() is None:
            raise RuntimeError(
                f"copy to the device: the host tensor ({described}) of a copy with non_blocking=True was freed before "
                "the device had read it; keep it until an event behind the copy is complete"
            )

    return check
