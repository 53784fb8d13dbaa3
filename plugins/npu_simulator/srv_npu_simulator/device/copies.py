"""The operators that no host kernel can stand in for: new memory, copies between memories, single numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from srv_npu_simulator.device.graph import Recorder, Task
from srv_npu_simulator.device.stream import Stream, deliver_later
from srv_npu_simulator.device.tensors import TensorFactory, host_view, is_device_tensor

_STATIC = "copy into a tensor that exists before the capture, and read results after the replay"


class Transfers:
    """Kernels that make device memory and cross between it and the host's."""

    def __init__(self, factory: TensorFactory, current_stream: Callable[[], Stream], recorder: Recorder) -> None:
        self._memory = factory.memory
        self._factory = factory
        self._current_stream = current_stream
        self._recorder = recorder

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """By the name of the operator."""
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
        _accept(layout, device, pin_memory)
        like = torch.empty(size, dtype=dtype or torch.get_default_dtype(), device="meta", memory_format=memory_format)
        return self._new(like)

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
        _accept(layout, device, pin_memory)
        return self._new(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype(), device="meta"))

    def _new(self, like: Tensor) -> Tensor:
        """Uninitialised device memory with the shape, strides and dtype of `like`, a meta tensor."""
        extents = zip(like.shape, like.stride(), strict=True)
        last = sum((extent - 1) * step for extent, step in extents)
        block = self._memory.reserve((last + 1) * like.dtype.itemsize if like.numel() else 0)
        host = torch.empty(0, dtype=like.dtype)
        host.set_(block.untyped_storage(), 0, like.shape, like.stride())
        tensor = self._factory.on_device(host)
        if (recording := self._recorder.active) is not None:
            recording.created(tensor)
        return tensor

    def zero_(self, tensor: Tensor) -> Tensor:
        view = host_view(tensor)
        self._memory.clear(view)
        if (recording := self._recorder.active) is not None:
            recording.add(Task("aten::zero_", view.zero_, (), {}, (None,)), [tensor], [])
        return tensor

    def copy_from(self, source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
        onto, off = is_device_tensor(destination), is_device_tensor(source)
        if onto and off:
            written, read = host_view(destination), host_view(source)
            written.copy_(read)
            if (recording := self._recorder.active) is not None:
                recording.add(Task("aten::copy_", written.copy_, (read,), {}, (None,)), [source, destination], [])
            return destination
        self._recorder.forbid("a copy between host and device", _STATIC)
        if onto:
            # The bytes are read at once even if non_blocking: that memory is not pinned.
            host_view(destination).copy_(source)
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
        if device is not None and device.type == "meta":
            return torch.empty_like(view, dtype=dtype, device=device, memory_format=memory_format)
        like = torch.empty_like(view, dtype=dtype, device="meta", memory_format=memory_format)
        if device is None or device.type == "npu":
            _accept(layout, device, pin_memory)
            return self.copy_from(source, self._new(like))
        self._recorder.forbid("a copy from device to host", _STATIC)
        _accept(layout, None, pin_memory)
        destination = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        return self.copy_from(source, destination, non_blocking)

    def local_scalar_dense(self, source: Tensor) -> bool | int | float | complex:
        self._recorder.forbid("item()", "it waits for the device; read the number after the replay")
        self._current_stream().synchronize()
        return host_view(source).item()

    def record_stream(self, source: Tensor, stream: object) -> None:
        """Nothing to do: memory is never reused while an operator is at work on it."""


def _accept(layout: torch.layout | None, device: torch.device | None, pin_memory: bool | None) -> None:
    if layout not in (None, torch.strided):
        raise NotImplementedError(f"the simulated NPU has dense tensors only, not {layout}")
    if device is not None and device.index not in (None, 0):
        raise RuntimeError(f"invalid device ordinal: {device} was asked for, but there is one device, npu:0")
    if pin_memory:
        raise NotImplementedError("the simulated NPU cannot pin host memory; leave pin_memory out")
