"""Token embeddings, whole or sharded over ranks by the vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.op_layer import TORCH, OpLayer
from srv.platform.interface import Communicator


class TokenEmbedding(OpLayer, ABC):
    """Looks up one row of `inputs` elements per token: int64 [T] -> [T, inputs] of the model's dtype.

    `name`: the name that checkpoints give to the layer, without ".weight". `vocab`: the rows of the checkpoint's matrix
    that this rank holds; tokens count from the first of them.
    """

    def __init__(self, dtype: torch.dtype, name: str, vocab: Slice, hidden: int) -> None:
        super().__init__()
        self.dtype, self.inputs = dtype, hidden
        self.name, self.vocab = name, vocab

    @abstractmethod
    def weight_views(self) -> dict[str, Tensor]:
        """The tensors that a loader fills, by their names in the checkpoint."""

    def weight_slices(self) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that the `weight_views` hold; of those that are not whole."""
        return {} if self.vocab.is_whole else dict.fromkeys(self.weight_views(), self.vocab)


class Embedding(TokenEmbedding):
    """Rows of `weight` [vocab, hidden], in the model's dtype."""

    op = "embedding"
    implementation = TORCH

    def __init__(self, context: BuildContext, name: str, vocab: Slice, hidden: int) -> None:
        super().__init__(context.dtype, name, vocab, hidden)
        self.weight = context.empty(vocab.end - vocab.begin, hidden)
        self.kernel = self.lookup

    def lookup(self, tokens: Tensor) -> Tensor:
        """The default kernel: torch's own operator."""
        return F.embedding(tokens, self.weight)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return ({"weight": self.weight},)

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight}


class VocabularyParallelLookup(nn.Module):
    """Looks up tokens of the whole vocabulary: each rank looks up those that it holds, and the others give zeros."""

    def __init__(self, embedding: TokenEmbedding, communicator: Communicator) -> None:
        super().__init__()
        self.embedding, self._communicator = embedding, communicator

    def forward(self, tokens: Tensor) -> Tensor:
        vocab = self.embedding.vocab
        outside = (tokens < vocab.begin) | (tokens >= vocab.end)
        rows: Tensor = self.embedding((tokens - vocab.begin).masked_fill(outside, 0))
        return self._communicator.all_reduce(rows.masked_fill(outside.unsqueeze(1), 0))
