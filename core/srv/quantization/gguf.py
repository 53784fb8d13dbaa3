"""GGUF files whose matrices stay in their quantization blocks. Torch-free.

Must not know the file format (`srv.models.checkpoints`), only which of its types layers can keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from srv.models.checkpoints.gguf_types import OP_TYPES, TYPES_BY_NAME
from srv.quantization.method import HeldMatrix, LayerOps, QuantMethod, StoredModel, TensorBytes
from srv.quantization.tensor_bytes import of_blocks

if TYPE_CHECKING:
    from srv.specs import ModelFacts


# Sixteenths of a byte per weight, scales and some slack included, of types that platforms keep in 4 bits or fewer.
# (Q2_K takes more than Q3_K where its scales are widened to 16 bits.) Other types may be unpacked to bytes.
_PACKED = {
    **{"Q2_K": 13, "Q3_K": 11, "Q4_0": 11, "Q4_1": 11, "Q4_K": 11},
    **{"IQ4_NL": 12, "IQ4_XS": 12, "MXFP4": 12},
    **{"TQ1_0": 6, "TQ2_0": 6, "IQ1_S": 9, "IQ1_M": 10},
    **{"IQ2_XXS": 9, "IQ2_XS": 10, "IQ2_S": 10, "IQ3_XXS": 11, "IQ3_S": 11},
}
_UNPACKED = 18


def weight_bytes(model: ModelFacts, item_size: int, projection_params: int) -> int:
    """The most that any platform's packing of the quantized weights takes, and `item_size` for all others."""
    quantized = {name: count for name, count in model.stored_types.items() if name in OP_TYPES}
    packed = sum(count * _PACKED.get(name, _UNPACKED) for name, count in quantized.items())
    return (model.counted_parameters() - sum(quantized.values())) * item_size + packed // 16


def loaded_bytes(model: ModelFacts, item_size: int) -> int:
    """The blocks as they are in the file, and `item_size` for all other weights."""
    kept = {TYPES_BY_NAME[name]: count for name, count in model.stored_types.items() if name in OP_TYPES}
    blocks = sum(count // each.elements * each.size for each, count in kept.items())
    return blocks + (model.counted_parameters() - sum(kept.values())) * item_size


def stays_quantized(types: Mapping[str, str], name: str, inputs: int) -> bool:
    """Whether a layer computes with the blocks of its matrix; `types`: of the stored tensors, by name."""
    quant_type = types.get(f"{name}.weight", "")
    return quant_type in OP_TYPES and inputs % TYPES_BY_NAME[quant_type].elements == 0


def layer_ops(model: StoredModel) -> LayerOps:
    def op(names: tuple[str, ...], inputs: int, rows: bool) -> str:
        if not all(stays_quantized(model.types, name, inputs) for name in names):
            return ""
        return "rows_gguf" if rows else "linear_gguf"

    return op


def tensor_bytes(model: StoredModel) -> TensorBytes:
    def sizes(matrix: HeldMatrix) -> tuple[int, ...]:
        """Consecutive layers of one type are one matrix."""
        named = zip(matrix.names, matrix.outputs, strict=True)
        runs = groupby(named, key=lambda part: model.types[f"{part[0]}.weight"])
        held = ((kind, matrix._replace(outputs=tuple(outputs for _, outputs in run))) for kind, run in runs)
        return tuple(size for kind, part in held for size in of_blocks(kind, part))

    return sizes


METHOD = QuantMethod(
    name="gguf",
    layers="srv.quantization.gguf_layers:GGUFLayerFactory",
    ops=("linear_gguf", "rows_gguf"),
    weight_bytes=weight_bytes,
    loaded_bytes=loaded_bytes,
    sharding=None,
    dequantizable=True,
    layer_ops=layer_ops,
    tensor_bytes=tensor_bytes,
)
