"""The conversion of the tensors of compressed-tensors: those of each layer in the format of its group.

Must not know which layer is in which group: `srv.quantization.formats.compressed_tensors` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from srv.models.checkpoints.storage import StorageFormat
from srv.quantization.formats.compressed_tensors import (
    COMPRESSED_TENSORS,
    Form,
    SchemeGroup,
    StoredGroups,
    mixed_form,
    read_packed,
)
from srv.quantization.formats.fp8_storage import Fp8StorageFormat
from srv.quantization.formats.fp8_weights import Fp8Form
from srv.quantization.formats.packed_integers import PackedForm, form_of
from srv.quantization.formats.packed_storage import PackedStorageFormat
from srv.quantization.formats.w8a8_int8_storage import W8A8StorageFormat
from srv.quantization.method import StoredModel


class MixedStorageFormat(StorageFormat):
    """The tensors of a quantized layer in the format of its scheme."""

    def __init__(self, model: StoredModel) -> None:
        mixed = mixed_form(model.facts.path, model.facts.config)
        self._groups, self._plain = StoredGroups(model, mixed), StorageFormat()
        self._formats = {group.scheme: _storage(model, group.scheme) for group in mixed.groups}

    def parts(self, name: str) -> tuple[str, ...]:
        return self._format(name).parts(name)

    def is_read_whole(self, name: str) -> bool:
        return self._format(name).is_read_whole(name)

    def unused(self, names: Collection[str]) -> set[str]:
        return {name for form, of_form in self._by_format(names).items() for name in form.unused(of_form)}

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for form, names in self._by_format(stored).items():
            shapes |= form.shapes({name: stored[name] for name in names})
        return shapes

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        return self._format(name).convert(name, stored)

    def _by_format(self, names: Iterable[str]) -> dict[StorageFormat, list[str]]:
        by_format: dict[StorageFormat, list[str]] = {}
        for name in names:
            by_format.setdefault(self._format(name), []).append(name)
        return by_format

    def _format(self, name: str) -> StorageFormat:
        group: SchemeGroup | None = self._groups.of_layer(name.rpartition(".")[0])
        return self._plain if group is None else self._formats[group.scheme]


def _storage(model: StoredModel, scheme: Form) -> StorageFormat:
    match scheme:
        case PackedForm():
            return PackedStorageFormat(model, scheme)
        case Fp8Form():
            return Fp8StorageFormat(model, scheme)
    return W8A8StorageFormat(model, scheme)


class PackedGroupsStorageFormat(PackedStorageFormat):
    """Packed integers in all quantized layers."""

    def __init__(self, model: StoredModel) -> None:
        super().__init__(model, form_of(COMPRESSED_TENSORS, read_packed, model))
