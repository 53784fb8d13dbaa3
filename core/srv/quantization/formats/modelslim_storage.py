"""The conversion of the tensors of modelslim checkpoints."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from srv.models.checkpoints.storage import StorageFormat
from srv.quantization.formats import modelslim
from srv.quantization.layers.int8 import check_finite, check_scales
from srv.quantization.method import StoredModel

# How the names of tensors end that scale others, or shift them.
_SCALES, _OFFSETS = (".weight_scale", ".deq_scale", ".input_scale"), (".weight_offset", ".input_offset")


class ModelslimStorageFormat(StorageFormat):
    """The format of modelslim, whose description says which tensors are redundant.

    Checkpoints for float16 store `deq_scale` as int64 [out] whose lower 32 bits are those of a float32, because one
    kernel takes it so. `input_offset` is a whole number that may have any dtype.
    """

    def __init__(self, model: StoredModel) -> None:
        self._path = model.facts.path
        self._description = modelslim.description_of(model)

    def unused(self, names: Collection[str]) -> set[str]:
        return modelslim.redundant(names, self._description)

    def is_read_whole(self, name: str) -> bool:
        """Values are converted one by one, so that parts of tensors can be."""
        return False

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if name.endswith(".deq_scale") and stored.dtype is torch.int64:
            stored = (stored & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
        if name.endswith(_SCALES):
            check_scales(self._path, name, stored)
        if name.endswith(_OFFSETS):
            check_finite(self._path, name, stored)
        return {name: stored.float() if name.endswith(".input_offset") else stored}
