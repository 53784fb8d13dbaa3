"""Operators that need their own kernels: allocation, copies between host and device, reading scalars."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.graphs import CROSSING, READING, Call, Recorder
from srv.testing.simulated_device.memory import DeviceMemory
from srv.testing.simulated_device.stream import Stream, enqueue_copy
from srv.testing.simulated_device.tensors import TensorFactory, host_view, is_device_tensor


class Transfers:
    """Kernels that allocate device memory and copy between device and host."""

    def __init__(
        self,
        device: torch.device,
        memory: DeviceMemory,
        factory: TensorFactory,
        recorder: Recorder,
        current_stream: Callable[[], Stream],
        reads_late: bool,
    ) -> None:
        self._device = device
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
        self._memory.clear(view)
        self._record("aten::zero_", view.zero_, (), [tensor])
        return tensor

    def copy_from(self, source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
        onto, off = is_device_tensor(destination), is_device_tensor(source)
        if onto and off:
            written, read = host_view(destination), host_view(source)
            written.copy_(read)
            self._record("aten::copy_", written.copy_, (read,), [source, destination])
            return destination
        self._recorder.refuse(*CROSSING)
        if onto:
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
        if device is None or device.type == self._device.type:
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
        """Do nothing: memory is never reused while an operator uses it."""

    def _record(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], inputs: list[Tensor]) -> None:
        graph = self._recorder.active
        if graph is not None:
            graph.add(Call(name, function, args, {}, (None,)), inputs)

    def _accept(self, layout: torch.layout | None, device: torch.device | None, pin_memory: bool | None) -> None:
        name = self._device.type
        if layout not in (None, torch.strided):
            raise NotImplementedError(f"{name} (simulated) has dense tensors only, not {layout}")
        if device is not None and device.index not in (None, 0):
            raise RuntimeError(
                f"invalid device ordinal: {device} was asked for, but there is one device, {self._device}"
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
