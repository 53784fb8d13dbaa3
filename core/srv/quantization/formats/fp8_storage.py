"""The conversion of stored FP8 weights and scales to the tensors of layers. Must not know configurations."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.storage import StorageFormat, TensorGroups
from srv.quantization.formats import fp8
from srv.quantization.formats.fp8_weights import DTYPE, INPUT_SCALES, Fp8Form, form_of, squeezed
from srv.quantization.method import DOWNLOAD_REMEDY, StoredModel
from srv.quantization.schemes import SCALE

_LARGEST = 448.0  # of float8_e4m3fn
_NAN = 0x7F  # its code, without the sign


class Fp8StorageFormat(StorageFormat):
    """FP8 weights with scales of any name and shape, which become those of layers; other scales are checked only."""

    def __init__(self, model: StoredModel, form: Fp8Form) -> None:
        self._path, self._model = model.facts.path, model
        self._form = form
        self._held_as = self._form.held
        self._sizes: dict[str, tuple[int, ...]] = {}  # of each FP8 weight, once `shapes` has seen it
        self._dequantized = TensorGroups()

    def parts(self, name: str) -> tuple[str, ...]:
        layer, kind = self._kind(name)
        match kind:
            case "weight" | "input":
                return (f"{layer}.weight",)  # a scale of inputs is read, so that it is checked
            case "scale":
                return (f"{layer}.{'weight' if self._model.dequantizes(layer) else SCALE}",)
        return (name,)

    def unused(self, names: Collection[str]) -> set[str]:
        return {name for name in names if name == f"lm_head.{SCALE}"}  # of the copy of a tied output layer

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            layer, kind = self._kind(name)
            if kind == "weight":
                self._sizes[layer] = shape
                if len(shape) == 2 and not self._model.dequantizes(layer):
                    shapes[f"{layer}.{SCALE}"] = self._held_as.scale_shape(*shape)
            if kind in ("weight", ""):
                shapes[self.parts(name)[0]] = shape
        return shapes

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        layer, kind = self._kind(name)
        match kind:
            case "":
                return {name: stored}
            case "weight":
                self._check_weight(name, stored)
                return self._made(layer, "weight", stored)
            case "scale":
                return self._made(layer, SCALE, self._held(layer, self._checked(name, stored, largest=_LARGEST)))
        self._checked(name, stored)
        return {}

    def _made(self, layer: str, suffix: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensor of a layer; or the dequantized weight, once weight and scale are there."""
        if not self._model.dequantizes(layer):
            return {f"{layer}.{suffix}": tensor}
        group = self._dequantized.add(layer, suffix, tensor, count=2)
        return {} if group is None else {f"{layer}.weight": self._widened(group["weight"], group[SCALE])}

    def _widened(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Dequantized in float32."""
        outputs, inputs = weight.shape
        rows, columns = self._held_as.block_of(inputs)
        wide = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        return weight.float() * wide

    def _kind(self, name: str) -> tuple[str, str]:
        """The layer of a tensor, and what it is: "weight", "scale", "input", or "" for unquantized ones."""
        layer, _, suffix = name.rpartition(".")
        if self._model.types.get(f"{layer}.{self._form.weight}") != DTYPE:
            return layer, ""
        if suffix in self._form.scales:
            return layer, "scale"
        if suffix in INPUT_SCALES:
            return layer, "input"
        return layer, "weight" if suffix == self._form.weight else ""

    def _check_weight(self, name: str, weight: Tensor) -> None:
        if bool(((weight.view(torch.uint8) & _NAN) == _NAN).any()):
            self._fail("damaged", f"{name} has values that are NaN")

    def _checked(self, name: str, scale: Tensor, largest: float = 1.0) -> Tensor:
        """A scale in float32.

        Raises ModelError unless it consists of finite numbers that are not negative, and stay finite times `largest`.
        """
        wide = scale.float()
        fits = (wide >= 0) & (wide * largest).isfinite()
        if not bool(fits.all()):
            wrong = wide[~fits].flatten()[0].item()
            if math.isfinite(wrong) and wrong > 0:
                self._fail("damaged", f"{name} has the value {wrong:g}, by which a weight of {largest:g} overflows")
            self._fail("damaged", f"{name} has the value {wrong:g}, which is not a finite number from 0 on")
        return wide

    def _held(self, layer: str, scale: Tensor) -> Tensor:
        """A scale with the shape that layers hold."""
        shape = self._held_as.scale_shape(*self._sizes[layer])
        scale = scale.reshape(squeezed(tuple(scale.shape)))
        return scale.reshape(1, 1).expand(shape) if scale.numel() == 1 else scale.reshape(shape)

    def _fail(self, code: str, reason: str) -> NoReturn:
        raise ModelError(code, self._path, reason, DOWNLOAD_REMEDY)


class StatedFp8StorageFormat(Fp8StorageFormat):
    """In the form that a configuration of `fp8` states."""

    def __init__(self, model: StoredModel) -> None:
        super().__init__(model, form_of(model, fp8.read))


class FBGEMMStorageFormat(Fp8StorageFormat):
    """In the form that a configuration of `fbgemm_fp8` states."""

    def __init__(self, model: StoredModel) -> None:
        super().__init__(model, form_of(model, fp8.read_fbgemm))
