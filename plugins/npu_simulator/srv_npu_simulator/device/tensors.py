"""Device tensors and the host memory behind them: from one to the other, without copying.

A device tensor is a plain torch.Tensor on "npu:0". Its storage carries an `Allocation`; `host_view` gives the
host tensor over the same bytes, `TensorFactory.on_device` the reverse. Only kernels may use these.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from srv_npu_simulator.device.memory import ADDRESS_OFFSET, Allocation, DeviceMemory

HOST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# `set_` writes a tensor's metadata only, so the host's kernel serves a device tensor as well.
_SET = torch.ops.aten.set_.source_Storage_storage_offset


class ForeignTensor(Exception):
    """A tensor of another device, where one of this device is needed."""


def is_device_tensor(value: object) -> bool:
    """True for a tensor of the simulated card."""
    return isinstance(value, Tensor) and value.device.type == "npu"


def allocation_of(tensor: Tensor) -> Allocation:
    """The memory behind a device tensor."""
    return cast(Allocation, tensor.untyped_storage().npu_allocation)  # type: ignore[attr-defined]


def host_view(tensor: Tensor) -> Tensor:
    """A host tensor over the bytes of `tensor`: same shape, strides and dtype.

    Remembered on the tensor. In-place view operators change a tensor without a kernel being told, so what was
    remembered is compared first; the view keeps its block alive, so an address means one block.
    Raises ForeignTensor for a tensor of another device.
    """
    view = cast(Tensor | None, getattr(tensor, "npu_host_view", None))
    if (
        view is not None
        and view.data_ptr() + ADDRESS_OFFSET == tensor.data_ptr()
        and view.shape == tensor.shape
        and view.stride() == tensor.stride()
        and view.dtype is tensor.dtype
    ):
        return view
    return _new_host_view(tensor)


def _new_host_view(tensor: Tensor) -> Tensor:
    if not is_device_tensor(tensor):
        raise ForeignTensor(f"a tensor on {tensor.device} has no bytes on npu:0")
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(allocation_of(tensor).host, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_complex() and tensor.is_conj():
        view = view.conj()
    if tensor.is_neg():
        view = torch._neg_view(view)
    tensor.npu_host_view = view  # type: ignore[attr-defined]
    return view


class TensorFactory:
    """Makes device tensors over host memory, counting it as device memory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self._device = torch.device("npu", 0)

    def on_device(self, host: Tensor) -> Tensor:
        """A new device tensor that takes over the memory of `host`, a tensor that nobody else holds."""
        tensor: Tensor = torch._C._acc.create_empty_tensor((0,), host.dtype)
        self._attach(tensor, self._storage(host), host)
        return tensor

    def follow(self, tensor: Tensor, view: Tensor) -> None:
        """Make `tensor` follow its host view, which an operator has resized (`resize_`, `out=`)."""
        storage = tensor.untyped_storage()
        host = view.untyped_storage()
        if storage.nbytes() != host.nbytes() or storage.data_ptr() != host.data_ptr() + ADDRESS_OFFSET:
            storage = self._storage(view)
        self._attach(tensor, storage, view)

    def _attach(self, tensor: Tensor, storage: torch.UntypedStorage, view: Tensor) -> None:
        _SET._handle.redispatch_boxed(HOST_KEYS, tensor, storage, view.storage_offset(), view.shape, view.stride())
        tensor.npu_host_view = view  # type: ignore[attr-defined]

    def _storage(self, host: Tensor) -> torch.UntypedStorage:
        block = host.untyped_storage()
        address = block.data_ptr()
        # PyTorch's stub says torch.Storage for what is an UntypedStorage.
        storage: Any = torch._C._construct_storage_from_data_pointer(
            address + ADDRESS_OFFSET if address else 0, self._device, block.nbytes()
        )
        storage.npu_allocation = self.memory.allocate(block)
        return cast(torch.UntypedStorage, storage)
