"""Tensors of devices with an index above 0, made through DLPack.

PyTorch's functions for backends in Python create tensors of the device with index 0 only. DLPack, by which libraries
hand tensors to one another, states a device and its index; its kDLExtDev is PyTorch's PrivateUse1.
https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch.utils.dlpack import from_dlpack

_EXT_DEVICE = 12  # kDLExtDev
_CAPSULE = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    """DLTensor. `dtype` holds DLDataType, whose four bytes are only copied."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor. It owns no memory, so that there is no deleter."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def empty_on(index: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the simulated device `index` with shape (0,)."""
    capsule = _new_capsule(ctypes.addressof(_described(index, dtype)), _CAPSULE, None)
    return from_dlpack(capsule)


@functools.cache  # what a capsule points to has to live as long as the tensor
def _described(index: int, dtype: torch.dtype) -> _Managed:
    host = torch.empty(0, dtype=dtype).__dlpack__()
    described = ctypes.cast(_pointer(host, _CAPSULE), ctypes.POINTER(_Managed)).contents.tensor
    shape, strides = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1)
    return _Managed(_Tensor(None, _Device(_EXT_DEVICE, index), 1, described.dtype, shape, strides, 0), None, None)
