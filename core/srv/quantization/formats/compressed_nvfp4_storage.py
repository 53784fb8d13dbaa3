"""The conversion of the tensors of compressed-tensors in NVFP4, and layers of them. Must not know configurations."""

from __future__ import annotations

from srv.models.layers.context import BuildContext
from srv.quantization.formats import compressed_nvfp4
from srv.quantization.formats.nvfp4_storage import NvFp4Factory, NvFp4Tensors
from srv.quantization.method import StoredModel


class NvFp4StorageFormat(NvFp4Tensors):
    def __init__(self, model: StoredModel) -> None:
        super().__init__(compressed_nvfp4.checkpoint(model))


class NvFp4Layers(NvFp4Factory):
    def __init__(self, context: BuildContext, model: StoredModel) -> None:
        super().__init__(context, compressed_nvfp4.checkpoint(model))
