"""GGUF files whose matrices stay in their quantization blocks. Torch-free.

Must not know the file format (`srv.models.checkpoints`), only which of its types layers can keep.
"""

from __future__ import annotations

from collections.abc import Mapping

from srv.errors import ModelError
from srv.models.checkpoints.gguf_types import OP_TYPES, TYPES_BY_NAME
from srv.quantization.method import QuantMethod, StoredModel
from srv.quantization.schemes import Blocks, LayerSchemes

_EXPERT = ".experts."


def stays_quantized(types: Mapping[str, str], name: str, inputs: int) -> bool:
    """Whether a layer computes with the blocks of its matrix; `types`: of the stored tensors, by name."""
    quant_type = types.get(f"{name}.weight", "")
    return quant_type in OP_TYPES and inputs % TYPES_BY_NAME[quant_type].elements == 0


def schemes(model: StoredModel) -> LayerSchemes:
    """Raises ModelError for experts of which some matrices stay quantized and others do not, or not as one type."""

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Blocks | None:
        quantized = [stays_quantized(model.types, name, inputs) for name in names]
        types = tuple(model.types.get(f"{name}.weight", "") for name in names)
        alike = len(set(types)) == 1
        if _EXPERT in names[0] and any(quantized) and not (alike and all(quantized)):
            raise _unlike_experts(names[0], types)
        if not all(quantized):
            return None
        return Blocks(types[:1] if alike else types)

    return scheme


def _unlike_experts(name: str, types: tuple[str, ...]) -> ModelError:
    stored = " and ".join(sorted({quant_type or "an unknown type" for quant_type in types}))
    return ModelError(
        "unsupported_quantization",
        f"{name.partition(_EXPERT)[0]}.experts",
        f"its experts are stored as {stored}, but they stay quantized only if gate and up are of one type, "
        "and down is of one type",
        "Set --dequantize-weights, or use another GGUF file",
    )


METHOD = QuantMethod(
    name="gguf",
    ops=("linear_gguf", "rows_gguf"),
    dequantizable=True,
    sharding=None,
    schemes=schemes,
)
