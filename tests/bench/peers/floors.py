"""The roofline of a load: the minimum time for the bytes that it must read and the products that it must compute.

Owns the count of bytes and operations of a decoder. Must not know any server: a floor depends only on the model, the
bytes of its weights, and the machine. A step reads every weight once, and the keys and values of every request; a
shared prefix is read once for all requests. Source: Williams, Waterman and Patterson, Roofline, CACM 52(4).
"""

from __future__ import annotations

from dataclasses import dataclass

from bench_loads import Workload
from machine import Ceilings


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model. `weight_bytes`: the bytes of its matrices in the form that is multiplied."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    weight_bytes: int
    kv_item_bytes: float = 2.0

    @property
    def layer_elements(self) -> int:
        """Elements of the matrices of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def elements(self) -> int:
        return self.layer_elements + self.hidden * self.vocab

    @property
    def kv_token_bytes(self) -> float:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_item_bytes


@dataclass(frozen=True)
class Work:
    """Bytes to read and operations to compute (a multiplication and an addition count as two)."""

    read: float
    operations: float

    def seconds(self, ceilings: Ceilings, arithmetic: str) -> float | None:
        """The longer of reading and computing, which overlap; None if a ceiling was not measured."""
        peak = ceilings.operations(arithmetic) or ceilings.f32
        return None if peak is None else max(self.read / ceilings.read, self.operations / peak) * 1e-9

    def bound(self, ceilings: Ceilings, arithmetic: str) -> str:
        peak = ceilings.operations(arithmetic) or ceilings.f32 or 1.0
        return "reading" if self.read / ceilings.read > self.operations / peak else "arithmetic"


def prefill(shape: Shape, workload: Workload) -> Work:
    """All prompts without the shared prefix, which is cached; the output layer for one token per request."""
    own_tokens = workload.prompt - workload.shared
    tokens = workload.requests * own_tokens
    pairs = workload.requests * own_tokens * (workload.shared + (own_tokens + 1) / 2)  # (query, key)
    attention = 4 * pairs * shape.layers * shape.heads * shape.head_dim
    products = 2 * (tokens * shape.layer_elements + workload.requests * shape.hidden * shape.vocab)
    return Work(shape.weight_bytes + workload.shared * shape.kv_token_bytes, products + attention)


def step(shape: Shape, workload: Workload) -> Work:
    """One token for every request, when half of the output has been generated."""
    length = workload.prompt + workload.output / 2
    kv_tokens = workload.shared + workload.requests * (length - workload.shared)
    attention = 4 * workload.requests * length * shape.layers * shape.heads * shape.head_dim
    products = 2 * workload.requests * shape.elements
    return Work(shape.weight_bytes + kv_tokens * shape.kv_token_bytes, products + attention)


def seconds(shape: Shape, workload: Workload, ceilings: Ceilings, arithmetic: str) -> float | None:
    """The floor of a whole load: its prompts, then one step for each further token."""
    first = prefill(shape, workload).seconds(ceilings, arithmetic)
    later = step(shape, workload).seconds(ceilings, arithmetic)
    return None if first is None or later is None else first + (workload.output - 1) * later
