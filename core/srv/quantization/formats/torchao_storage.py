"""The conversion of the tensors of torchao's checkpoints. Must not know configurations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.storage import StorageFormat, TensorGroups
from srv.quantization.formats.block_codes import codes_of
from srv.quantization.formats.fp8_storage import Fp8StorageFormat
from srv.quantization.formats.packed_words import blocks
from srv.quantization.formats.torchao import BLOCK_TYPE, DATA, SCALE, ZERO, form_of
from srv.quantization.method import DOWNLOAD_REMEDY, StoredModel
from srv.quantization.schemes import row_bytes

_MIDDLE = 8  # what is added to integers of 4 bits, so that none is negative


class TorchAOStorageFormat(StorageFormat):
    """The format of the form that the configuration states."""

    def __init__(self, model: StoredModel) -> None:
        form = form_of(model)
        self._format: StorageFormat
        match form.weights:
            case "int8":
                self._format = Int8Format(model)
            case "int4":
                self._format = Int4Format(model)
            case "fp8":
                self._format = Fp8StorageFormat(model, form.fp8)

    def parts(self, name: str) -> tuple[str, ...]:
        return self._format.parts(name)

    def unused(self, names: Collection[str]) -> set[str]:
        return self._format.unused(names)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return self._format.shapes(stored)

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        return self._format.convert(name, stored)


class Int8Format(StorageFormat):
    """`_weight_qdata` and `_weight_scale` become `weight` and `weight_scale`; zero points are checked."""

    def __init__(self, model: StoredModel) -> None:
        self._path, self._dequantizes = model.facts.path, model.dequantizes
        self._groups = TensorGroups()

    def parts(self, name: str) -> tuple[str, ...]:
        layer, _, suffix = name.rpartition(".")
        if suffix == DATA or (suffix in (SCALE, ZERO) and self._dequantizes(layer)):
            return (f"{layer}.weight",)
        return (f"{layer}.weight_scale",) if suffix in (SCALE, ZERO) else (name,)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            layer, _, suffix = name.rpartition(".")
            if suffix != ZERO and not (suffix == SCALE and self._dequantizes(layer)):
                shapes[self.parts(name)[0]] = shape
        return shapes

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        layer, _, suffix = name.rpartition(".")
        if suffix == ZERO:
            if bool(stored.any()):
                reason = f"{name} is not 0, and srv supports only symmetric int8 weights"
                _fail(self._path, "unsupported_quantization", reason)
            return {}
        if suffix == SCALE:
            _check_scale(self._path, name, stored)
        if suffix in (DATA, SCALE) and self._dequantizes(layer):
            group = self._groups.add(layer, suffix, stored, count=2)
            return {} if group is None else {f"{layer}.weight": group[DATA].float() * group[SCALE].float()}
        return {self.parts(name)[0]: stored}


class Int4Format(StorageFormat):
    """Integers, scales and zeros, which become rows of blocks, `weight`, when all of a layer are there."""

    def __init__(self, model: StoredModel) -> None:
        self._path, self._dequantizes = model.facts.path, model.dequantizes
        self._groups = TensorGroups()

    def parts(self, name: str) -> tuple[str, ...]:
        layer, _, suffix = name.rpartition(".")
        return (f"{layer}.weight",) if suffix in (DATA, SCALE, ZERO) else (name,)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            suffix = name.rpartition(".")[2]
            if suffix == DATA and len(shape) == 2:
                outputs, inputs = shape[0], shape[1] * 2
                width = inputs if self._dequantizes(name.rpartition(".")[0]) else row_bytes(BLOCK_TYPE, inputs)
                shapes[self.parts(name)[0]] = (outputs, width)
            elif suffix not in (SCALE, ZERO):
                shapes[name] = shape
        return shapes

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        layer, _, suffix = name.rpartition(".")
        if suffix not in (DATA, SCALE, ZERO):
            return {name: stored}
        if suffix == SCALE:
            _check_scale(self._path, name, stored)
        elif suffix == ZERO:
            _check_finite(self._path, name, stored)
        tensors = self._groups.add(layer, suffix, stored, len((DATA, SCALE, ZERO)))
        return {} if tensors is None else {f"{layer}.weight": self._rows(layer, tensors)}

    def _rows(self, layer: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Rows of blocks, or floats."""
        scale, zero = (tensors[suffix].t().float() for suffix in (SCALE, ZERO))
        codes = codes_of(tensors[DATA].view(torch.uint8))
        if self._dequantizes(layer):
            group = codes.shape[1] // scale.shape[1]
            wide, offsets = (tensor.repeat_interleave(group, 1) for tensor in (scale, zero))
            return ((codes ^ _MIDDLE).float() - _MIDDLE) * wide + offsets
        scales, least = scale.to(torch.float16), (zero - _MIDDLE * scale).to(torch.float16)
        if bool((scales.isinf() | least.isinf() | ((scales == 0) & (scale != 0))).any()):
            _fail(self._path, "damaged", f"a scale of {layer} is not a number that float16 can hold")
        values = codes ^ _MIDDLE  # of two's complement: the same as adding 8
        return blocks(values, scales.contiguous(), None, 4, least.contiguous())


def _check_scale(path: str, name: str, stored: Tensor) -> None:
    """torchao derives scales from magnitudes, so that none is negative."""
    if not bool(((stored >= 0) & stored.isfinite()).all()):
        _fail(path, "damaged", f"a scale in {name} is not a finite number from 0 on")


def _check_finite(path: str, name: str, stored: Tensor) -> None:
    if not bool(stored.isfinite().all()):
        _fail(path, "damaged", f"a number in {name} is not finite")


def _fail(path: str, code: str, reason: str) -> NoReturn:
    raise ModelError(code, path, reason, DOWNLOAD_REMEDY)
