"""The conversion of the tensors of modelslim checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.storage import StorageFormat, TensorGroups
from srv.quantization.formats import modelslim
from srv.quantization.layers.int8 import check_finite, check_scales
from srv.quantization.method import StoredModel

# How the names of tensors end that scale others, or shift them.
_SCALES, _OFFSETS = (".weight_scale", ".deq_scale", ".input_scale"), (".weight_offset", ".input_offset")


class ModelslimStorageFormat(StorageFormat):
    """The format of modelslim, whose description says which tensors are redundant.

    Checkpoints for float16 store `deq_scale` as int64 [out] whose lower 32 bits are those of a float32, because one
    kernel takes it so. `input_offset` is a whole number that may have any dtype.

    Of a model whose weights are dequantized, the tensors of a layer become its weight and, with static activations, the
    bias that its integers contain.
    """

    def __init__(self, model: StoredModel) -> None:
        self._model, self._path = model, model.facts.path
        self._description = modelslim.description_of(model)
        self._groups = TensorGroups()

    def parts(self, name: str) -> tuple[str, ...]:
        layer, suffix = name.rpartition(".")[::2]
        tensors = self._merged(layer)
        if suffix in tensors:
            return tuple(f"{layer}.{part}" for part in ("weight", *(("bias",) if "quant_bias" in tensors else ())))
        return () if "quant_bias" in tensors else (name,)  # the others of such a layer are redundant

    def is_read_whole(self, name: str) -> bool:
        """Whether only whole tensors can be converted; values that stay quantized are converted one by one."""
        return self.parts(name) != (name,) or bool(self._merged(name.rpartition(".")[0]))

    def unused(self, names: Collection[str]) -> set[str]:
        redundant = modelslim.redundant(names, self._description)
        if not self._model.dequantize:
            return redundant
        return {name for name in redundant if name.endswith(".bias")}  # the integers contain no more than the offset

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            if not self._merged(name.rpartition(".")[0]):
                shapes[name] = shape
            elif name.endswith(".weight"):
                shapes |= dict(zip(self.parts(name), (shape, shape[:1]), strict=False))
            elif self.parts(name) == (name,):
                shapes[name] = shape
        return shapes

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if name.endswith(".deq_scale") and stored.dtype is torch.int64:
            stored = (stored & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
        if name.endswith(_SCALES):
            check_scales(self._path, name, stored)
        if name.endswith(_OFFSETS):
            check_finite(self._path, name, stored)
        layer, suffix = name.rpartition(".")[::2]
        tensors = self._merged(layer)
        if suffix not in tensors:
            return {name: stored.float() if name.endswith(".input_offset") else stored}
        group = self._groups.add(layer, suffix, stored, len(tensors))
        return {} if group is None else self._dequantized(layer, group)

    def _merged(self, layer: str) -> tuple[str, ...]:
        """The suffixes of the tensors of a layer that is dequantized; () of any other one."""
        return modelslim.tensors_of(self._description, layer) if self._model.dequantize else ()

    def _dequantized(self, layer: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = tensors["weight"].float()
        if "weight_scale" in tensors:
            if bool(tensors["weight_offset"].any()):
                reason = f"{layer}.weight_offset is not 0, and srv supports only symmetric int8 weights"
                raise ModelError("unsupported_quantization", self._path, reason, "Quantize the model again")
            return {f"{layer}.weight": weight * tensors["weight_scale"].float()}
        scale, offset = tensors["deq_scale"].float(), tensors["input_offset"].double()
        sums = tensors["quant_bias"].double() + offset * weight.double().sum(1)
        return {
            f"{layer}.weight": weight * (scale / tensors["input_scale"].float()).unsqueeze(1),
            f"{layer}.bias": (sums * scale).float(),
        }
