"""Device tensors and their host memory, and the conversion between them without copying.

A device tensor is a plain torch.Tensor on the device. Its storage has a `Block`; `host_view` returns the host tensor
with the same memory, `TensorFactory.on_device` does the reverse. Only kernels may use these.

        device tensor ──storage──> device storage (device address)
              │                        └─ .simulated_block ─> Block ─> host storage
              └─ .simulated_host_view ──────────────────────────────────┘  (cached, validated)

The device's name comes from PyTorch, because a process has only one PrivateUse1 backend.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from srv.testing.simulated_device.exchange import empty_on
from srv.testing.simulated_device.graphs import Recorder
from srv.testing.simulated_device.memory import ADDRESS_OFFSET, Block, DeviceMemory
from srv.testing.simulated_device.placement import HOST

# The dispatch key of the host's kernels.
HOST_KEY: str = torch._C._dispatch_key_for_device(HOST.type)
HOST_KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(HOST_KEY))

# `set_` only writes a tensor's metadata, so the host's kernel serves a device tensor as well.
_SET = torch.ops.aten.set_.source_Storage_storage_offset


class ForeignTensor(Exception):
    """A tensor of another device, where one of this device is needed."""


def is_device_tensor(value: object) -> bool:
    """True for a tensor of the simulated device."""
    return isinstance(value, Tensor) and value.device.type == torch._C._get_privateuse1_backend_name()


def block_of(tensor: Tensor) -> Block:
    """The memory behind a device tensor."""
    return cast(Block, tensor.untyped_storage().simulated_block)  # type: ignore[attr-defined]


def host_view(tensor: Tensor) -> Tensor:
    """A host tensor that shares the memory of `tensor`, with the same shape, strides and dtype.

    It is cached on the tensor, because creating one costs more than the smallest operators. `tensor.data = other` and
    in-place view operators change a tensor without calling a kernel, so the cached view is validated first. Its address
    cannot belong to another block, because the view keeps its block alive. Raises ForeignTensor for another device.
    """
    try:
        view = cast(Tensor, tensor.simulated_host_view)  # type: ignore[attr-defined]
    except AttributeError:
        return _new_host_view(tensor)
    if (
        view.data_ptr() + ADDRESS_OFFSET == tensor.data_ptr()
        and view.shape == tensor.shape
        and view.stride() == tensor.stride()
        and view.dtype is tensor.dtype
    ):
        return view
    return _new_host_view(tensor)


def _new_host_view(tensor: Tensor) -> Tensor:
    if not is_device_tensor(tensor):
        raise ForeignTensor(f"a tensor on {tensor.device} has no memory on the simulated device")
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(block_of(tensor).host, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_complex() and tensor.is_conj():
        view = view.conj()
    if tensor.is_neg():
        view = torch._neg_view(view)
    tensor.simulated_host_view = view  # type: ignore[attr-defined]
    return view


class TensorFactory:
    """Creates device tensors backed by host memory, which is accounted to the device or, in a capture, to the graph."""

    def __init__(self, device: torch.device, memory: DeviceMemory, recorder: Recorder) -> None:
        self.device = device
        self._memory = memory
        self._recorder = recorder

    def on_device(self, host: Tensor) -> Tensor:
        """A new device tensor that takes over the memory of `host`, a tensor without other references."""
        graph = self._recorder.active
        if graph is not None:
            host = graph.memory.place(host)
        tensor = self._empty(host.dtype)
        self._attach(tensor, self._storage(host), host)
        if graph is not None:
            graph.created(tensor)
        return tensor

    def _empty(self, dtype: torch.dtype) -> Tensor:
        """A tensor of the device without elements; PyTorch's own function for it knows the device with index 0 only."""
        if self.device.index == 0:
            return torch._C._acc.create_empty_tensor((0,), dtype)
        return empty_on(self.device.index, dtype)

    def empty_like(self, like: Tensor) -> Tensor:
        """An uninitialised device tensor with the shape, strides and dtype of `like`, a meta tensor."""
        extents = zip(like.shape, like.stride(), strict=True)
        last = sum((extent - 1) * stride for extent, stride in extents)
        buffer = self._memory.reserve((last + 1) * like.dtype.itemsize if like.numel() else 0)
        host = torch.empty(0, dtype=like.dtype)
        host.set_(buffer.untyped_storage(), 0, like.shape, like.stride())
        return self.on_device(host)

    def adopt_view(self, tensor: Tensor, view: Tensor) -> None:
        """Set the storage, sizes and strides of `tensor` to those of its host view, which an operator has resized.

        Such operators are `resize_` and those with `out=`.
        """
        storage = tensor.untyped_storage()
        host_storage = view.untyped_storage()
        if storage.nbytes() != host_storage.nbytes() or storage.data_ptr() != host_storage.data_ptr() + ADDRESS_OFFSET:
            storage = self._storage(view)
        self._attach(tensor, storage, view)

    def _attach(self, tensor: Tensor, storage: torch.UntypedStorage, view: Tensor) -> None:
        _SET._handle.redispatch_boxed(HOST_KEYS, tensor, storage, view.storage_offset(), view.shape, view.stride())
        tensor.simulated_host_view = view  # type: ignore[attr-defined]

    def _storage(self, host: Tensor) -> torch.UntypedStorage:
        host_storage = host.untyped_storage()
        address = host_storage.data_ptr()
        # PyTorch's stub declares torch.Storage, but it is an UntypedStorage.
        storage: Any = torch._C._construct_storage_from_data_pointer(
            address + ADDRESS_OFFSET if address else 0, self.device, host_storage.nbytes()
        )
        graph = self._recorder.active
        storage.simulated_block = (self._memory if graph is None else graph.memory).allocate(host_storage)
        return cast(torch.UntypedStorage, storage)
