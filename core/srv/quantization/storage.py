"""The storage formats of quantized checkpoints, and the quantization of unquantized ones while they are loaded.

Each class is the `StorageFormat` of one method: how the stored names, shapes and dtypes differ from those of the
layers. Must not know files or layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from srv.models.formats.storage import StorageFormat
from srv.quantization.modelslim import QuantDescription
from srv.quantization.w8a8_int8 import is_quantized_online

_SCALE = ".weight_scale"
_INT8_MAX = 127


class ModelslimStorageFormat(StorageFormat):
    """The format of modelslim; `description` says which tensors are redundant.

    Checkpoints for float16 store `deq_scale` as int64 [out] whose lower 32 bits are those of a float32, because one
    kernel takes it so. `input_offset` is a whole number that may have any dtype.
    """

    def __init__(self, description: QuantDescription) -> None:
        self._description = description

    def unused(self, names: Collection[str]) -> set[str]:
        return self._description.unused(names)

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if name.endswith(".deq_scale") and stored.dtype is torch.int64:
            stored = (stored & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
        return {name: stored.float() if name.endswith(".input_offset") else stored}


class Int8StorageFormat(StorageFormat):
    """The format of w8a8_int8: one scale per output channel, [out, 1] or [out]."""

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {
            name: (*shape, 1) if name.endswith(_SCALE) and len(shape) == 1 else shape for name, shape in stored.items()
        }

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        return {name: stored.unsqueeze(1) if name.endswith(_SCALE) and stored.dim() == 1 else stored}


class OnlineInt8StorageFormat(StorageFormat):
    """Unquantized checkpoints whose linear layers are quantized to int8 while they are loaded."""

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        layers = {name.removesuffix(".weight"): shape for name, shape in stored.items() if _is_quantized(name)}
        return {**stored, **{f"{layer}{_SCALE}": (shape[0], 1) for layer, shape in layers.items()}}

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if not _is_quantized(name):
            return {name: stored}
        quantized, scale = quantize_int8(stored)
        return {name: quantized, f"{name.removesuffix('.weight')}{_SCALE}": scale}


def _is_quantized(name: str) -> bool:
    layer, _, suffix = name.rpartition(".")
    return suffix == "weight" and is_quantized_online(layer)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 quantization per output channel: [out, in] -> int8 [out, in], float32 scales [out, 1].

    The largest magnitude of each row becomes 127. A row of zeros has the scale 0.
    """
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / _INT8_MAX
    return (wide / torch.where(scale == 0, 1.0, scale)).round_().to(torch.int8), scale
