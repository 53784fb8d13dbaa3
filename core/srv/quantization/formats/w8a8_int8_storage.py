"""The conversion of the tensors of w8a8_int8 checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from srv.models.checkpoints.storage import StorageFormat, TensorGroups
from srv.quantization.formats.int8_weights import INPUT_SCALE, INT8, Int8Form
from srv.quantization.formats.w8a8_int8 import form_of
from srv.quantization.layers.int8 import check_scales
from srv.quantization.method import StoredModel
from srv.quantization.schemes import SCALE

_STATIC = ("deq_scale", "quant_bias", "input_scale", "input_offset")  # of a layer with static activations


class W8A8StorageFormat(StorageFormat):
    """Int8 weights with scales of any shape, which become one per output.

    Those of static activations become the tensors that a layer multiplies its sums by, and adds to them: symmetric
    quantization needs no correction, and the bias is added by itself.
    """

    def __init__(self, model: StoredModel, scheme: Int8Form | None = None) -> None:
        """`scheme`: None for the one that the configuration of the checkpoint states."""
        self._path, self._model = model.facts.path, model
        self._scheme = scheme or form_of(model.facts.config)
        self._groups = TensorGroups()

    def parts(self, name: str) -> tuple[str, ...]:
        layer, suffix = self._split(name)
        if suffix and self._model.dequantizes(layer):
            return (f"{layer}.weight",)
        if not suffix or self._scheme.inputs != "static":
            return (name,)
        return tuple(f"{layer}.{part}" for part in _STATIC)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            layer, suffix = self._split(name)
            if not suffix:
                shapes[name] = shape
            elif self._model.dequantizes(layer):
                continue
            elif self._scheme.inputs != "static":
                shapes[name] = (self._outputs(layer), 1)
            else:
                outputs = (self._outputs(layer),)
                shapes |= dict(zip(self.parts(name), (outputs, outputs, (1,), (1,)), strict=True))
        return shapes

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        layer, suffix = self._split(name)
        if not suffix:
            widened = stored.dtype == torch.int8 and self._model.dequantizes(layer)
            return self._dequantized(layer, "weight", stored) if widened else {name: stored}
        check_scales(self._path, name, stored)
        if suffix == SCALE:
            stored = stored.float().reshape(-1, 1).expand(self._outputs(layer), 1)
        if self._model.dequantizes(layer):
            return self._dequantized(layer, suffix, stored)
        if self._scheme.inputs != "static":
            return {name: stored}
        group = self._groups.add(layer, suffix, stored, count=2)
        return {} if group is None else self._static(layer, group[SCALE][:, 0], group[INPUT_SCALE].float().reshape(1))

    def _dequantized(self, layer: str, suffix: str, stored: Tensor) -> dict[str, Tensor]:
        count = 3 if self._scheme.inputs == "static" else 2
        group = self._groups.add(layer, suffix, stored, count)
        return {} if group is None else {f"{layer}.weight": group["weight"].float() * group[SCALE]}

    def _static(self, layer: str, scale: Tensor, input_scale: Tensor) -> dict[str, Tensor]:
        bias = torch.zeros(len(scale), dtype=torch.int32)
        tensors = (scale * input_scale, bias, input_scale, torch.zeros(1))
        return dict(zip((f"{layer}.{part}" for part in _STATIC), tensors, strict=True))

    def _split(self, name: str) -> tuple[str, str]:
        """The layer and the suffix of a scale of an int8 layer; a suffix of "" for all other tensors."""
        layer, _, suffix = name.rpartition(".")
        scales = (SCALE, INPUT_SCALE) if self._scheme.inputs == "static" else (SCALE,)
        quantized = suffix in scales and self._model.types.get(f"{layer}.weight") == INT8
        return layer, suffix if quantized else ""

    def _outputs(self, layer: str) -> int:
        return self._model.shapes[f"{layer}.weight"][0]
