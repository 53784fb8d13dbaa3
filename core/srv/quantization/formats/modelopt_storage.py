"""The conversion of the tensors of ModelOpt's checkpoints. Must not know configurations."""

from __future__ import annotations

from srv.models.layers.context import BuildContext
from srv.quantization.formats import modelopt
from srv.quantization.formats.fp8_storage import Fp8StorageFormat
from srv.quantization.formats.fp8_weights import form_of
from srv.quantization.formats.nvfp4_storage import NvFp4Factory, NvFp4Tensors
from srv.quantization.method import StoredModel


class ModelOptStorageFormat(Fp8StorageFormat):
    """FP8 weights in the form that the configuration states."""

    def __init__(self, model: StoredModel) -> None:
        super().__init__(model, form_of(model, modelopt.read_fp8))


class NvFp4StorageFormat(NvFp4Tensors):
    def __init__(self, model: StoredModel) -> None:
        super().__init__(modelopt.nvfp4_checkpoint(model))


class NvFp4Layers(NvFp4Factory):
    def __init__(self, context: BuildContext, model: StoredModel) -> None:
        super().__init__(context, modelopt.nvfp4_checkpoint(model))
