"""The conversion of the tensors of AWQ checkpoints."""

from __future__ import annotations

from srv.quantization.formats import awq
from srv.quantization.formats.packed_integers import form_of
from srv.quantization.formats.packed_storage import PackedStorageFormat
from srv.quantization.method import StoredModel


class AWQStorageFormat(PackedStorageFormat):
    """Packed integers in the form that the configuration states."""

    def __init__(self, model: StoredModel) -> None:
        super().__init__(model, form_of(awq.NAME, awq.read_form, model))
