"""The bytes of the tensors that layers hold for a quantized matrix, for methods to say them. Torch-free.

Owns the arithmetic that several methods share. What is counted are the tensors of `OpLayer.weight_tensors`: codes,
scales and zero points, but neither biases nor what belongs to inputs.
"""

from __future__ import annotations

from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.quantization.method import HeldMatrix, StoredModel, TensorBytes

_SCALE_BYTES = 4  # float32


def of_blocks(quant_type: str, matrix: HeldMatrix) -> tuple[int, ...]:
    """Rows of GGUF blocks, which contain their scales."""
    kind = TYPES_BY_NAME[quant_type]
    return (sum(matrix.outputs) * (matrix.inputs // kind.elements * kind.size),)


def of_rows(matrix: HeldMatrix) -> tuple[int, ...]:
    """A byte per weight, and a float32 scale per output."""
    outputs = sum(matrix.outputs)
    return outputs * matrix.inputs, outputs * _SCALE_BYTES


def always_rows(model: StoredModel) -> TensorBytes:
    """As `QuantMethod.tensor_bytes`, for methods whose layers are always those of `of_rows`."""
    return of_rows
