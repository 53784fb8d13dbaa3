"""The least time that a step of a dense decoder can take on a device, from its shape: arithmetic only.

A decode step reads every weight of the layers and of the output layer once, and the keys and values of every row. A
prefill multiplies every weight by every token, and each query by the keys that it sees. The embedding is not counted:
one row per token is read.
"""

from __future__ import annotations

from dataclasses import dataclass

# Shares of the floor that this project aims at, by what is measured.
AIMS = {"decode 1": 0.85, "decode 64": 0.70, "prefill": 0.60}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with gated MLPs, grouped-query attention, and an output layer of its own, in 16-bit floats."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    element_bytes = 2

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrices of one layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that one step reads."""
        layer = self.matrix_elements + 2 * self.hidden
        return self.element_bytes * (self.layers * layer + self.hidden + self.hidden * self.vocab)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all weights, the embedding included."""
        return self.step_bytes + self.element_bytes * self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.element_bytes * self.layers * self.kv_heads * self.head_dim

    def decode_floor_s(self, batch: int, context: float, bytes_per_s: float) -> float:
        """Seconds of a step of `batch` rows with `context` tokens each, if reading is all that it does."""
        return (self.step_bytes + batch * context * self.kv_bytes) / bytes_per_s

    def prefill_floor_s(self, tokens: int, operations_per_s: float) -> float:
        """Seconds of a prompt's products, of which only the last token reaches the output layer."""
        products = 2 * tokens * self.layers * self.matrix_elements + 2 * self.hidden * self.vocab
        key_pairs = tokens * (tokens + 1) // 2
        attention = 4 * self.layers * self.heads * self.head_dim * key_pairs
        return (products + attention) / operations_per_s


LLAMA_3_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)
# For simulated devices; FlashInfer needs heads of 64 elements.
TINY = Shape(1, 64, 128, 2, 1, 64, 64)


def verdict(name: str, share: float) -> str:
    """The aim of a measurement and whether it is met; empty without an aim."""
    if name not in AIMS:
        return ""
    return f"{'met' if share >= AIMS[name] else 'not met'} (aim {AIMS[name]:.0%})"
