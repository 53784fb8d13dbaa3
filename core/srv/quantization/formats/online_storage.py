"""Quantization of unquantized checkpoints while they are loaded: to int8 or FP8, with a scale per output."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from srv.models.checkpoints.storage import StorageFormat
from srv.quantization.formats.online import is_quantized
from srv.quantization.method import StoredModel
from srv.quantization.schemes import SCALE

_INT8_MAX = 127
_LARGEST = 448.0  # of float8_e4m3fn


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 quantization per output channel: [out, in] -> int8 [out, in], float32 scales [out, 1].

    The largest magnitude of each row becomes 127. A row of zeros has the scale 0.
    """
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / _INT8_MAX
    return (wide / torch.where(scale == 0, 1.0, scale)).round_().to(torch.int8), scale


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 quantization per output: [out, in] -> float8_e4m3fn [out, in], float32 scales [out, 1].

    The largest magnitude of each row becomes 448. A row of zeros has the scale 0.
    """
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / _LARGEST
    scaled = wide / torch.where(scale == 0, 1.0, scale)
    return scaled.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale


class OnlineStorageFormat(StorageFormat):
    """Unquantized checkpoints whose linear layers are quantized while they are loaded, by `quantize`."""

    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        layers = {name.removesuffix(".weight"): shape for name, shape in stored.items() if _is_quantized(name)}
        return {**stored, **{f"{layer}.{SCALE}": (shape[0], 1) for layer, shape in layers.items()}}

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if not _is_quantized(name):
            return {name: stored}
        quantized, scale = self.quantize(stored)
        return {name: quantized, f"{name.removesuffix('.weight')}.{SCALE}": scale}


class OnlineInt8StorageFormat(OnlineStorageFormat):
    """To int8."""

    def __init__(self, model: StoredModel) -> None:
        self.quantize = quantize_int8


class OnlineFp8StorageFormat(OnlineStorageFormat):
    """To FP8."""

    def __init__(self, model: StoredModel) -> None:
        self.quantize = quantize_fp8


def _is_quantized(name: str) -> bool:
    layer, _, suffix = name.rpartition(".")
    return suffix == "weight" and is_quantized(layer)
