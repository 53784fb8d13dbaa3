"""The layers of checkpoints that are quantized to int8 while they are loaded, and the quantization itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from srv.models.formats.storage import StorageFormat
from srv.quantization.int8_online import is_quantized
from srv.quantization.method import StoredModel

_SCALE = ".weight_scale"
_INT8_MAX = 127


class OnlineInt8StorageFormat(StorageFormat):
    """Unquantized checkpoints whose linear layers are quantized to int8 while they are loaded."""

    def __init__(self, model: StoredModel) -> None:
        """The format is the same for every model."""

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        layers = {name.removesuffix(".weight"): shape for name, shape in stored.items() if _becomes_int8(name)}
        return {**stored, **{f"{layer}{_SCALE}": (shape[0], 1) for layer, shape in layers.items()}}

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if not _becomes_int8(name):
            return {name: stored}
        quantized, scale = quantize_int8(stored)
        return {name: quantized, f"{name.removesuffix('.weight')}{_SCALE}": scale}


def _becomes_int8(name: str) -> bool:
    layer, _, suffix = name.rpartition(".")
    return suffix == "weight" and is_quantized(layer)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 quantization per output channel: [out, in] -> int8 [out, in], float32 scales [out, 1].

    The largest magnitude of each row becomes 127. A row of zeros has the scale 0.
    """
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / _INT8_MAX
    return (wide / torch.where(scale == 0, 1.0, scale)).round_().to(torch.int8), scale
