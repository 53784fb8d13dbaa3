"""GGUF files whose matrices stay in their quantization blocks. Torch-free.

Must not know the file format (`srv.models.formats`), only which of its types layers can keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srv.models.formats.gguf_types import OP_TYPES
from srv.quantization.method import QuantMethod

if TYPE_CHECKING:
    from srv.specs import ModelFacts


def weight_bytes(model: ModelFacts, item_size: int, projection_params: int) -> int:
    """Quantized weights count as one byte, and one 16-bit scale per 16 of them: enough for every platform's packing."""
    quantized = sum(count for name, count in model.stored_types.items() if name in OP_TYPES)
    return (model.parameters - quantized) * item_size + quantized * 9 // 8


METHOD = QuantMethod(
    name="gguf",
    layers="srv.quantization.gguf_layers:GGUFLayerFactory",
    ops=("linear_gguf", "rows_gguf"),
    weight_bytes=weight_bytes,
    sharding=None,
    dequantizable=True,
)
