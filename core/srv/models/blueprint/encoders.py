"""Parts of encoders: their layers, whose norms precede or follow attention and MLP, and a classification head.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from srv.models.blueprint import MLP, Activation, Attention, Norm, Output, Part, Stack, Table, Weight


@dataclass(frozen=True)
class EncoderLayer(Part):
    """`pre_norm`: norms precede attention and MLP; otherwise they follow the additions to the residual.

    `attention_norm`: None if that of the embeddings takes its place.
    """

    attention_norm: Norm | None
    attention: Attention
    mlp_norm: Norm
    mlp: MLP
    pre_norm: bool


@dataclass(frozen=True)
class RelativeBias(Part):
    """What is added to the scores of all layers: a row of a number per head for each bucket of distances (MPNet)."""

    buckets: int
    heads: int

    def weights(self) -> Iterator[Weight]:
        yield Weight("weight", (self.buckets, self.heads))


@dataclass(frozen=True)
class EncoderStack(Stack):
    """An encoder without a head. `first_position`: the row of the first token in `positions`. `bias`: of distances."""

    layers: tuple[EncoderLayer, ...]
    positions: Table | None
    types: Table | None
    embedding_norm: Norm | None
    final_norm: Norm | None
    first_position: int
    bias: RelativeBias | None = None


@dataclass(frozen=True)
class ClassificationHead(Part):
    """score(norm(activation(dense(x)))). The norm is optional."""

    dense: Output
    norm: Norm | None
    score: Output
    activation: Activation


@dataclass(frozen=True)
class Encoder(Part):
    """An encoder, with a classification head if it has one."""

    stack: EncoderStack
    head: ClassificationHead | None
