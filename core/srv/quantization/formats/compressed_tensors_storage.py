"""The layers of checkpoints of compressed-tensors with several schemes: each is made by the factory of its scheme.

The conversion of stored tensors is divided in the same way. Must not know which layer has which scheme, nor what layers
do with it: `srv.quantization.formats.compressed_tensors` and the layers of each scheme do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from srv.models.checkpoints.storage import StorageFormat
from srv.quantization.formats.compressed_tensors import Form, Group, StoredGroups, scheme_of
from srv.quantization.formats.fp8_configs import Fp8Form
from srv.quantization.formats.fp8_storage import Fp8StorageFormat
from srv.quantization.formats.packed import PackedForm
from srv.quantization.formats.packed_storage import PackedStorageFormat
from srv.quantization.formats.w8a8_int8_storage import W8A8StorageFormat
from srv.quantization.method import StoredModel


class MixedStorageFormat(StorageFormat):
    """The tensors of a quantized layer in the format of its scheme."""

    def __init__(self, model: StoredModel) -> None:
        mixed = scheme_of(model.facts.path, model.facts.config)
        self._groups, self._plain = StoredGroups(model, mixed), StorageFormat()
        self._formats = {group.scheme: _storage(model, group.scheme) for group in mixed.groups}

    def parts(self, name: str) -> tuple[str, ...]:
        return self._format(name).parts(name)

    def is_read_whole(self, name: str) -> bool:
        return self._format(name).is_read_whole(name)

    def unused(self, names: Collection[str]) -> set[str]:
        return {name for name in names if self._format(name).unused((name,))}

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        by_format: dict[StorageFormat, dict[str, tuple[int, ...]]] = {}
        for name, shape in stored.items():
            by_format.setdefault(self._format(name), {})[name] = shape
        found: dict[str, tuple[int, ...]] = {}
        for each, shapes in by_format.items():
            found |= each.shapes(shapes)
        return found

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        return self._format(name).convert(name, stored)

    def _format(self, name: str) -> StorageFormat:
        group: Group | None = self._groups.of_layer(name.rpartition(".")[0])
        return self._plain if group is None else self._formats[group.scheme]


def _storage(model: StoredModel, scheme: Form) -> StorageFormat:
    match scheme:
        case PackedForm():
            return PackedStorageFormat(model, scheme)
        case Fp8Form():
            return Fp8StorageFormat(model, scheme)
    return W8A8StorageFormat(model, scheme)
