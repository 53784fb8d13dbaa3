"""The operators that no host kernel can stand in for: new memory, copies between memories, single numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from srv_toy_device.device.graphs import Recorder
from srv_toy_device.device.memory import DeviceMemory
from srv_toy_device.device.stream import Stream, deliver_later
from srv_toy_device.device.tensors import TensorFactory, host_view, is_device_tensor


class Transfers:
    """Kernels that make device memory and cross between it and the host's."""

    def __init__(
        self, memory: DeviceMemory, factory: TensorFactory, recorder: Recorder, current_stream: Callable[[], Stream]
    ) -> None:
        self._memory = memory
        self._recorder = recorder
        self._factory = factory
        self._current_stream = current_stream

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """By the name of the operator."""
        return {
            "empty.memory_format": self.empty,
            "empty_strided": self.empty_strided,
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
        count = 1
        for extent in size:
            count *= extent
        self._memory.require(count * dtype.itemsize)
        return self._factory.on_device(
            torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
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
        last = sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        self._memory.require((last + 1) * dtype.itemsize if all(size) else 0)
        return self._factory.on_device(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(self, source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
        if not (is_device_tensor(destination) and is_device_tensor(source)):
            self._recorder.refuse("a copy between host and device")
        elif self._recorder.active:
            self._recorder.add(Tensor.copy_, (host_view(destination), host_view(source)), {}, ())
        if is_device_tensor(destination):
            # From the host, the bytes are read at once even if non_blocking: that memory is not pinned.
            host_view(destination).copy_(host_view(source) if is_device_tensor(source) else source)
        elif non_blocking:
            deliver_later(self._current_stream(), host_view(source), destination)
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
        if device is None or device.type == "toy":
            self._accept(layout, device, pin_memory)
            self._memory.require(view.numel() * (dtype or view.dtype).itemsize)
            return self._onto_device(source, view, {"dtype": dtype, "memory_format": memory_format})
        if device.type == "meta":
            return torch.empty_like(view, dtype=dtype, device=device, memory_format=memory_format)
        self._recorder.refuse("a copy between host and device")
        self._accept(layout, None, pin_memory)
        if not non_blocking:
            self._current_stream().synchronize()
            return torch.ops.aten._to_copy(view, dtype=dtype, memory_format=memory_format)  # type: ignore[no-any-return]
        destination = torch.empty_like(view, dtype=dtype, memory_format=memory_format)
        deliver_later(self._current_stream(), view, destination)
        return destination

    def _onto_device(self, source: Tensor, view: Tensor, options: dict[str, Any]) -> Tensor:
        if not is_device_tensor(source):
            self._recorder.refuse("a copy between host and device")
        made = self._factory.on_device(torch.ops.aten._to_copy(view, **options))
        if self._recorder.active:
            self._recorder.add(torch.ops.aten._to_copy, (view,), options, (host_view(made),))
        return made

    def local_scalar_dense(self, source: Tensor) -> bool | int | float | complex:
        self._recorder.refuse("reading a number on the host")
        self._current_stream().synchronize()
        return host_view(source).item()

    def record_stream(self, source: Tensor, stream: object) -> None:
        """Nothing to do: memory is never reused while an operator is at work on it."""

    def _accept(self, layout: torch.layout | None, device: torch.device | None, pin_memory: bool | None) -> None:
        if layout not in (None, torch.strided):
            raise NotImplementedError(f"toy has dense tensors only, not {layout}")
        if device is not None and device.index not in (None, 0):
            raise RuntimeError(f"invalid device ordinal: {device} was asked for, but there is one device, toy:0")
        if pin_memory:
            raise NotImplementedError("toy cannot pin host memory; leave pin_memory out")
