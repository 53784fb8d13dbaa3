"""The conversion of the tensors of ModelOpt's checkpoints."""

from __future__ import annotations

from srv.quantization.formats import modelopt
from srv.quantization.formats.fp8_storage import Fp8StorageFormat
from srv.quantization.formats.fp8_weights import form_of
from srv.quantization.method import StoredModel


class ModelOptStorageFormat(Fp8StorageFormat):
    """FP8 weights in the form that the configuration states."""

    def __init__(self, model: StoredModel) -> None:
        super().__init__(model, form_of(model, modelopt.read))
