"""The tensor types of GGUF files: name, elements per block, bytes per block. Torch-free data.

Owns the table. Must not know how a block is dequantized (`srv.models.checkpoints.gguf_loader` does). The ids and sizes
are those of ggml (`ggml.h`, `ggml-common.h`), which never reuses an id.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class TensorType(NamedTuple):
    """One ggml type: `elements` consecutive values of a row are stored together in `size` bytes."""

    name: str
    elements: int
    size: int

    @property
    def quantized(self) -> bool:
        """Whether values are stored in quantization blocks with shared scales."""
        return self.elements > 1


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}

# Blocks of other checkpoints, which the same ops multiply; no file has them. Those of bitsandbytes are a float32, by
# which a table of 16 values is multiplied, and 64 codes of 4 bits in GGUF's order.
OTHER_BLOCKS = (TensorType("NF4", 64, 36), TensorType("FP4", 64, 36))

TYPES_BY_NAME: Mapping[str, TensorType] = MappingProxyType(
    {each.name: each for each in (*TENSOR_TYPES.values(), *OTHER_BLOCKS)}
)

# Types of 1 to 3 bits: indices of vectors in a codebook, and ternary values. Only platforms with the capability
# "gguf_codebooks" multiply them.
CODEBOOK_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")

# The types that the ops `linear_gguf` and `rows_gguf` support.
OP_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
    *CODEBOOK_TYPES,
)
